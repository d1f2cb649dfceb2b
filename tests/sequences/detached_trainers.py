"""Detached trainers, whose own process dies, too."""

from __future__ import annotations

import itertools
import os
from typing import Any, ClassVar

import ray

from raysgd.torch import TorchTrainer
from tests.sequences import deaths
from tests.sequences.grammar import Grammar
from tests.sequences.subjects import CALLS, MOMENTS, MOST
from tests.sequences.torch_trainers import TorchSubject

_numbers = itertools.count()


class DetachedSubject(TorchSubject):
    """The handle on a detached `TorchTrainer`. Once its process has died, the state may live in the workers alone."""

    num_kept = 1

    grammar = Grammar(CALLS, MOST, ("item", "model"), {**MOMENTS, "process": 6})

    def made(self) -> Any:
        name = f"sequences-{os.getpid()}-{next(_numbers)}"
        return TorchTrainer(training_operator_cls=self.operator, config=self.config(0), detached=name, **self.options())

    def end_process(self) -> None:
        deaths.end(ray.get(self.trainer._actor.describe.remote(), timeout=60)["pid"])

    def stacks(self) -> list[str]:
        return []


class DetachedCollateSubject(DetachedSubject):
    data: ClassVar[str] = "collate"


SUBJECTS = {"detached": DetachedSubject, "detached-collate": DetachedCollateSubject}
