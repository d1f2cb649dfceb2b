"""Objects that a batch changes are put back, or it is known that they cannot be.

Covers `raysgd.torch.parallel.copies`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import pickle
import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.torch.parallel.copies import ObjectCopies


@dataclasses.dataclass
class Average:
    total: float = 0.0
    values: list[float] = dataclasses.field(default_factory=list)


class Warmup:
    """A function of a scheduler that is an object."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, epoch: int) -> float:
        self.num_calls += 1
        return 1 / self.num_calls


class Empty:
    pass


def add_to_average(average: Any) -> None:
    average.total += 1
    average.values.append(2.0)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {1: [2]}, lambda it: it.update({1: 3, 4: 5})),
    "inner list": (lambda: {"a": (1, [2])}, lambda it: it["a"][1].append(3)),
    "ordered dict": (lambda: OrderedDict(a=[1]), lambda it: it["a"].clear()),
    "counter": (lambda: Counter("ab"), lambda it: it.update("b")),
    "set": (lambda: {1, 2}, lambda it: it.remove(1)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda it: it.append(3)),
    "array": (lambda: np.arange(3), lambda it: it.__iadd__(1)),
    "random": (lambda: random.Random(1), lambda it: it.random()),
    "generator of NumPy": (lambda: np.random.default_rng(1), lambda it: it.random()),
    "old generator of NumPy": (lambda: np.random.RandomState(1), lambda it: it.rand()),
    "dataclass": (Average, add_to_average),
    "object": (Warmup, lambda it: it(1)),
    "object without attributes": (Empty, lambda it: setattr(it, "a", 1)),
    "namespace": (lambda: SimpleNamespace(a=[1]), lambda it: it.a.append(2)),
    "partial": (lambda: functools.partial(Warmup(), epoch=1), lambda it: it()),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), lambda it: it.scale(torch.ones(1))),
}


def bits(value: Any) -> bytes:
    return pickle.dumps(vars(value) if isinstance(value, torch.amp.GradScaler) else value)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_batch_changes_is_put_back_in_the_same_object(kind: str) -> None:
    make, change = CHANGES[kind]
    value = make()
    before, copies = bits(value), ObjectCopies(set())
    copies.copy({"value": [value]})
    assert copies.unknown is None
    change(value)
    assert bits(value) != before
    copies.restore()
    assert bits(value) == before


def test_a_generator_of_pytorch_draws_the_same_numbers_again() -> None:
    generator, copies = torch.Generator().manual_seed(1), ObjectCopies(set())
    copies.copy(generator)
    drawn = torch.rand(2, generator=generator).tolist()
    copies.restore()
    assert torch.rand(2, generator=generator).tolist() == drawn


def test_tensors_are_collected_wherever_they_are() -> None:
    model, tensors = torch.nn.BatchNorm1d(1), [torch.zeros(1) for _ in range(3)]
    copies = ObjectCopies(set())
    copies.copy([SimpleNamespace(a=tensors[0]), {tensors[1]}, deque([(tensors[2], model)])])
    expected = {*map(id, (*tensors, *model.parameters(), *model.buffers()))}
    assert {*map(id, copies.tensors)} == expected


class Slotted:
    __slots__ = ("a",)


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), itertools.count(), iter([1]), (each for each in "ab"), Slotted(), bytearray(b"a"), threading],
    ids=lambda value: type(value).__name__,
)
def test_an_object_whose_state_cannot_be_read_is_known(value: Any) -> None:
    copies = ObjectCopies(set())
    copies.copy([SimpleNamespace(a=value)])
    assert copies.unknown is type(value)


def test_what_programs_keep_in_their_optimizers_has_no_unknown_state() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.Adam(parameters)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup()),
        torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2)], milestones=[1]
        ),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    copies = ObjectCopies(set())
    copies.copy([optimizer, *schedulers, torch.amp.GradScaler("cpu"), logging.getLogger(), len, Warmup, bits])
    assert copies.unknown is None
