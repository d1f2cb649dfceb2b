"""Structures of tensors on their way to a device."""

from __future__ import annotations

from collections import defaultdict, namedtuple

import torch

from raysgd.torch.moving import read_tensors, to_device


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


def test_tensors_of_several_devices_are_read_one_by_one() -> None:
    assert read_tensors([torch.tensor([2]), torch.tensor(0.5)]) == [2.0, 0.5]
