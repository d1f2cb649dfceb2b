"""Structures of tensors on their way to a device."""

from __future__ import annotations

import copy
import sys
from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray.cloudpickle
import torch
from torch.nn.utils import parametrizations, parametrize
from transformers import BatchEncoding, BertConfig, BertModel
from transformers.modeling_outputs import SequenceClassifierOutput

from raysgd.torch.objects.models import packed, read_tensors, to_device, unpacked


def test_nested_structures_are_moved_as_a_whole() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    given = {"a": [torch.ones(1), (torch.ones(1), "text")], "b": Pair(torch.ones(1), 3)}
    moved = to_device(given, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].left.device.type == "meta"
    assert (type(moved["a"][1]), type(moved["b"])) == (tuple, Pair)
    assert (moved["a"][1][1], moved["b"].right) == ("text", 3)


def test_dicts_of_any_class_are_moved_and_left_as_they_were() -> None:
    given = defaultdict(list, {"a": torch.ones(1)})
    moved = to_device(given, torch.device("meta"))
    assert (type(moved), moved["a"].device.type, moved["missing"]) == (defaultdict, "meta", [])
    assert given["a"].device.type == "cpu"


@dataclass(frozen=True)
class Batch:
    """Computes a field that its `__init__` does not take."""

    x: torch.Tensor
    lengths: list[torch.Tensor]
    total: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.x.device.type == "cpu", "it was made another time"
        object.__setattr__(self, "total", int(self.x.sum()))


def test_dataclasses_are_moved_without_their_init() -> None:
    given = Batch(torch.ones(2), [torch.ones(1)])
    moved = to_device(given, torch.device("meta"))
    assert (type(moved), moved.x.device.type, moved.lengths[0].device.type, moved.total) == (Batch, "meta", "meta", 2)
    assert given.x.device.type == "cpu"


def test_containers_of_transformers_are_moved_as_what_they_are() -> None:
    kinds: list[Any] = [UserDict, BatchEncoding, lambda each: SequenceClassifierOutput(**each)]
    for kind in kinds:
        given = kind({"logits": torch.ones(1)})
        moved = to_device(given, torch.device("meta"))
        assert (type(moved), moved["logits"].device.type) == (type(given), "meta")
        assert getattr(moved, "logits", moved["logits"]).device.type == "meta"


class Asked(torch.Tensor):
    """Knows whether a copy of it may be read before it is complete, as one from a GPU may."""

    def to(self, *args: Any, non_blocking: bool = False, **options: Any) -> Any:
        return non_blocking


def test_what_is_moved_to_the_cpu_can_be_read_at_once() -> None:
    moved = [to_device([torch.ones(1).as_subclass(Asked)], torch.device(kind))[0] for kind in ("cpu", "cuda")]
    assert moved == [False, True]


def test_tensors_of_several_devices_are_read_one_by_one() -> None:
    assert read_tensors([torch.tensor([2]), torch.tensor(0.5)]) == [2.0, 0.5]


def weight_and_bias(layer: torch.nn.Module) -> torch.nn.Module:
    return parametrizations.weight_norm(parametrizations.spectral_norm(layer), "bias", dim=None)


@pytest.mark.parametrize(
    "make",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, weight_and_bias],
)
def test_a_parametrized_model_is_the_same_in_another_process_and_apart_from_its_origin(make: Any) -> None:
    model, features = torch.nn.Sequential(make(torch.nn.Linear(3, 3))).eval(), torch.randn(2, 3)
    copied = unpacked(ray.cloudpickle.loads(ray.cloudpickle.dumps(packed(copy.deepcopy(model)))))
    assert list(copied.state_dict()) == list(model.state_dict())
    assert torch.equal(copied(features), model(features))
    with torch.no_grad():
        copied[0].weight = 2 * copied[0].weight
    parametrize.remove_parametrizations(copied[0], "weight")
    assert hasattr(model[0], "weight")


def test_a_model_of_transformers_collects_outputs_in_another_process_too() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model, words = BertModel(BertConfig(vocab_size=9, **sizes)).eval(), torch.arange(4)[None]
    expected = model(words, output_hidden_states=True).hidden_states
    dumped = ray.cloudpickle.dumps(packed(model))
    getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", {}).clear()
    copied = unpacked(ray.cloudpickle.loads(dumped))
    torch.testing.assert_close(copied(words, output_hidden_states=True).hidden_states, expected)
