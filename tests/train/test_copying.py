from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.train._copying import copied, unwrapped


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
