"""Structures of tensors on their way to a device."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from raysgd.torch.objects.moving import read_tensors, to_device


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


def test_tensors_of_several_devices_are_read_one_by_one() -> None:
    assert read_tensors([torch.tensor([2]), torch.tensor(0.5)]) == [2.0, 0.5]
