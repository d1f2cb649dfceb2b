from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.train._copying import Copier, unwrapped

copied = Copier().copied


class Plain:
    def __init__(self) -> None:
        self.values = [1]


def test_nothing_of_a_copy_is_shared() -> None:
    state: dict[str, Any] = {
        "tensor": torch.zeros(3),
        "array": np.zeros(4),
        "nested": [{"tensor": torch.zeros(2)}, (torch.zeros(1),)],
        "object": Plain(),
        "number": 3,
    }
    copy, num_bytes = copied(state)
    state["tensor"] += 1
    state["array"] += 1
    state["nested"][0]["tensor"] += 1
    state["object"].values.append(2)
    assert copy["tensor"].sum() == copy["array"].sum() == copy["nested"][0]["tensor"].sum() == 0
    assert copy["object"].values == [1]
    assert copy["number"] == 3
    assert num_bytes == 3 * 4 + 4 * 8 + 2 * 4 + 4


def test_what_is_there_twice_is_copied_once() -> None:
    tensor = torch.zeros(3)
    copy, num_bytes = copied({"a": tensor, "b": [tensor]})
    assert copy["a"] is copy["b"][0]
    assert num_bytes == 12


def test_a_model_is_copied_with_its_size() -> None:
    model = torch.nn.Linear(2, 1)
    copy, num_bytes = copied({"model": model})
    with torch.no_grad():
        model.weight += 1
    assert not torch.equal(copy["model"].weight, model.weight)
    assert num_bytes == 12


def test_a_model_keeps_what_is_tied_frozen_or_in_no_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    copy, _ = copied(model)
    assert copy[1].weight is copy[0].weight
    assert isinstance(copy[0].weight, torch.nn.Parameter)
    assert [parameter.requires_grad for parameter in copy.parameters()] == [True, False, True, True, True]
    assert copy.hidden == 1
    assert copy(torch.ones(2, 2)).shape == (2, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(1).expand(4),
        torch.tensor(3, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(0, 3),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_every_kind_of_tensor_comes_out_equal(tensor: torch.Tensor) -> None:
    [copy], _ = copied([tensor])
    assert copy is not tensor
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(copy.to_dense(), tensor.detach().to_dense())


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3).T, np.full((), 3.0), np.zeros((0, 2)), np.array([{}, None])]
)
def test_every_kind_of_array_comes_out_equal(array: Any) -> None:
    [copy], _ = copied([array])
    assert copy is not array
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert (copy == array).all()


def test_a_copy_is_saved_as_it_is_not_with_the_memory_around_it(tmp_path: Path) -> None:
    copy, num_bytes = copied({"a": torch.zeros(1 << 18), "b": torch.zeros(8)})
    assert num_bytes > 1 << 20
    torch.save(copy["b"], tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 4096


def test_memory_is_used_again_when_nothing_is_left_in_it_and_not_before() -> None:
    copier = Copier()
    first = copier.copied(torch.zeros(1 << 18))[0]
    address = first.data_ptr()
    second = copier.copied(torch.ones(1 << 18))[0]
    assert (first.max(), second.min()) == (0, 1)
    part = first[5:]
    del first
    assert copier.copied(torch.ones(1 << 18))[0].data_ptr() != address
    assert part.max() == 0
    del part
    assert copier.copied(torch.ones(1 << 18))[0].data_ptr() == address


def test_a_part_of_something_divided_is_refused_with_advice() -> None:
    class Divided(torch.Tensor):
        def full_tensor(self) -> None: ...

    with pytest.raises(ValueError, match="gather_state"):
        copied([torch.zeros(2).as_subclass(Divided)])


def test_the_state_of_a_model_stays_one_that_can_be_loaded() -> None:
    model = torch.nn.BatchNorm1d(2)
    copy, _ = copied(model.state_dict())
    assert isinstance(copy, OrderedDict)
    assert copy._metadata == model.state_dict()._metadata
    model.load_state_dict(copy)


def test_a_tensor_comes_without_its_graph() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    copy, _ = copied([leaf * 2])
    assert not copy[0].requires_grad


@pytest.mark.parametrize("value", [3, "text", torch.nn.Linear(1, 1)])
def test_only_a_wrapper_is_unwrapped(value: Any) -> None:
    assert unwrapped(value) is value
