"""Parts that programs of several kinds have: models, optimizers, data, calls. Workers import this."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from raysgd.testing import kill_worker
from tests.programs.grammar import Choices, Value, Words, kill_of
from tests.programs.outcomes import Outcome, Row

NUM_FEATURES, NUM_CLASSES = 3, 4
RATE = 0.1

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01),
    # Where a gradient is nothing but rounding, a small `eps` makes a step of it.
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, eps=1e-3),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1e-3, weight_decay=0.1),
}


class Kind(ABC):
    """A class of programs: how they are drawn, what they are with the library, and what they are without.

    Attributes:
        name: Of the kind.
        choices: For each word what it may say; the plainest part comes first.
        core: The words that the kind is about, which are drawn more often than others.
    """

    name: ClassVar[str]
    choices: ClassVar[Choices]
    core: ClassVar[Sequence[str]]

    def settled(self, words: Words) -> dict[str, Value]:
        """Return the words without parts that make no program, or one of which the documentation promises nothing."""
        return dict(words)

    @abstractmethod
    def plain(self, words: Words) -> Outcome:
        """Run the program in one process, without the library."""

    @abstractmethod
    def operator(self, words: Words) -> type[Any]:
        """Return what the trainer trains."""

    @abstractmethod
    def options(self, words: Words) -> dict[str, Any]:
        """Return what the trainer is told beside the operator and the number of workers."""

    @abstractmethod
    def run(self, trainer: Any, words: Words) -> Outcome:
        """Make the calls of the program."""


def filled(model: torch.nn.Module, seed: int = 7) -> torch.nn.Module:
    """Return a model in float64 with weights of its own, which leave the global generators alone."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def network(num_outputs: int, seed: int = 7) -> torch.nn.Module:
    """Return a small model."""
    layers = torch.nn.Linear(NUM_FEATURES, 5), torch.nn.Tanh(), torch.nn.Linear(5, num_outputs)
    return filled(torch.nn.Sequential(*layers), seed)


def table(seed: int, *shape: int) -> torch.Tensor:
    """Return random numbers, the same in all processes."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(seed: int, *shape: int) -> torch.Tensor:
    """Return random classes, the same in all processes."""
    return torch.randint(NUM_CLASSES, shape, generator=torch.Generator().manual_seed(seed))


class Mean:
    """A mean with weights."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, value: Any, weight: float) -> None:
        if weight:
            self.total += float(value) * weight
            self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


def chunks(items: Sequence[Any], size: int, drops_last: bool = False) -> list[list[Any]]:
    """Return the items in batches."""
    found = [list(items[first : first + size]) for first in range(0, len(items), size)]
    return [each for each in found if len(each) == size] if drops_last else found


def flat(batches: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the items of batches."""
    return [item for batch in batches for item in batch]


def steps_of(words: Words) -> list[int | None]:
    """Return for each call of `train` the number of its steps; None is the rest of the pass."""
    return [None if each == "all" else int(each) for each in str(words["calls"]).split(",")]


def batches_of_calls(words: Words, batches_of_pass: Callable[[int], list[Any]]) -> list[tuple[int, list[Any]]]:
    """Return for each call of `train` the number of its pass, from 1 on, and its batches.

    Args:
        words: Of the program.
        batches_of_pass: Number of a pass, from 0 on -> its batches.
    """
    found, index, left = [], -1, []
    for num_steps in steps_of(words):
        if not left:
            index += 1
            left = batches_of_pass(index)
        num_taken = len(left) if num_steps is None else num_steps
        assert num_taken <= len(left), "a call ends in its pass"
        found.append((index + 1, left[:num_taken]))
        left = left[num_taken:]
    return found


def arm(trainer: Any, words: Words, call: int) -> None:
    """Let a worker die in a call of `train`, if the words say so."""
    kill = kill_of(words)
    if kill is not None and kill[2] == call:
        kill_worker(trainer, kill[0], at=f"step:{kill[1]}")


def is_killed(words: Words, call: int) -> bool:
    """Return whether a worker may die in a call of `train`: the one it is armed for, or the next if that is short."""
    kill = kill_of(words)
    return kill is not None and kill[2] in (call, call - 1)


def train_and_validate(trainer: Any, words: Words) -> Outcome:
    """Make the calls that most programs make."""
    outcome = Outcome()
    for call, num_steps in enumerate(steps_of(words)):
        arm(trainer, words, call)
        outcome.rows.append(dict(trainer.train(num_steps=num_steps)))
        outcome.rows.append(dict(trainer.validate()))
    models = trainer.get_model()
    return outcome.keep(*(models if isinstance(models, list | tuple) else [models]))


def without(row: Row, *names: str) -> Row:
    """Return a row without what is not compared."""
    return {name: value for name, value in row.items() if name not in names}
