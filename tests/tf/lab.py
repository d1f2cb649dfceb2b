"""Replicas side by side in the workers of a running trainer: a real group, without a start for every case.

And, in one process, a group without connections.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysgd.core.connections.group import Array, Group
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers import results
from raysgd.core.numbers.meters import MetricSummary
from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import TFSettings
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest

SEED = 5


@dataclass(frozen=True)
class Experiment:
    """What to do with a new operator on every rank: `calls` are pairs of "train" or "validate" and number of steps."""

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any] = field(default_factory=dict)
    calls: Sequence[tuple[str, int | None]] = (("train", None),)
    options: Mapping[str, Any] = field(default_factory=dict)

    def run_in(self, world: World) -> tuple[list[EpochAnswer], Any]:
        """Answers, and the state at the end."""
        runner = TFRunner(TFSettings(self.operator_cls, self.config, SEED, **self.options), world)
        runner.setup()
        answers = []
        for call, num_steps in self.calls:
            method = {"train": runner.train_epoch, "validate": runner.validate}[call]
            answers.append(method(EpochRequest(num_steps, {}, False, SEED)))
        end = {"state": runner.state(), "seen": getattr(runner.operator, "seen", None)}
        runner.shutdown()
        return answers, end


@dataclass(frozen=True)
class Findings:
    """What came of an experiment.

    Attributes:
        results: The merged result of each call.
        single: The result of each call on each rank.
        state: The state on each rank.
        seen: What the operator noted, on each rank.
    """

    results: list[dict[str, Any]]
    single: list[list[dict[str, Any]]]
    state: list[dict[str, Any]]
    seen: list[Any]


def run_alone(lab: TFTrainer, experiment: Experiment) -> Findings:
    """Run it as one replica, in one of the workers of `lab`."""
    return _findings(lab.apply_all_workers(lambda: experiment.run_in(World(0, 1)) if rank() == 0 else None)[:1])


def run_together(lab: TFTrainer, experiment: Experiment) -> Findings:
    """Run it as one replica in each worker of `lab`, in its group."""
    num_workers = lab.num_workers
    return _findings(lab.apply_all_workers(lambda: experiment.run_in(World(rank(), num_workers))))


def refusals(lab: TFTrainer, experiment: Experiment) -> list[Exception]:
    """What each rank raises over it. They return it, as the engine replaces ranks that fail late."""

    def attempt() -> Exception | None:
        try:
            experiment.run_in(World(rank(), num_workers))
        except Exception as error:
            return error
        return None

    num_workers = lab.num_workers
    found = lab.apply_all_workers(attempt)
    assert None not in found
    return found


def forget_pytorch() -> None:
    """Where workers are forked, they have it: see `tests/helpers/forked.py`. Whatever needs it imports it again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]


def rank() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def largest_difference(left: Mapping[str, Any], right: Mapping[str, Any], part: str = "models") -> float:
    """Between the arrays of two states."""
    pairs = [
        (a, b) for one, other in zip(left[part], right[part], strict=True) for a, b in zip(one, other, strict=True)
    ]
    return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max(initial=0.0)) for a, b in pairs)


def _findings(outcomes: Sequence[tuple[list[EpochAnswer], Any]]) -> Findings:
    by_call = list(zip(*[answers for answers, _ in outcomes], strict=True))
    return Findings(
        results=[results.merge([_metrics(answer) for answer in answers]) for answers in by_call],
        single=[[dict(_metrics(answer)) for answer in answers] for answers in by_call],
        state=[end["state"] for _, end in outcomes],
        seen=[end["seen"] for _, end in outcomes],
    )


def _metrics(answer: EpochAnswer) -> MetricSummary:
    assert answer.metrics is not None
    return answer.metrics


class TwoAlike(Group):
    """Rank 0 of two; what the other one sends is what this one has."""

    def __init__(self) -> None:
        super().__init__(World(0, 2))

    def add_up(self, numbers: Array) -> None:
        numbers *= 2

    def gather(self, numbers: Array) -> list[Array]:
        return [numbers, numbers]

    def from_first(self, numbers: Array) -> None:
        """They have them already."""
