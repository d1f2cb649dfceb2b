"""Mistakes in code that two workers run: one error, with the ranks and the line, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.exceptions import WorkerError
from raysgd.torch import TorchTrainer
from tests.mistakes.mistaken import Careless
from tests.mistakes.table import Mistake, check

pytestmark = pytest.mark.integration


OPTIONS: dict[str, Any] = {"num_workers": 2, "num_cpus_per_worker": 0.5, "use_gpu": False}


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer[Any]]:
    with TorchTrainer(Careless, **OPTIONS) as trainer:
        yield trainer


def in_batch(mistake: str, **where: Any) -> Any:
    return lambda trainer: trainer.train(info={"mistake": mistake, **where})


def in_setup(mistake: str) -> Any:
    return lambda trainer: trainer.reset_config({"mistake": mistake})


TABLE = {
    each.name: each
    for each in (
        Mistake(
            "shapes",
            in_batch("multiplies_wrong_shapes"),
            RuntimeError,
            "on ranks 0, 1",
            "return self.model(batch[0].transpose(0, 1)[:, :2])",
        ),
        Mistake(
            "a method, on one rank",
            in_batch("calls_a_missing_method", rank=1),
            AttributeError,
            "on rank 1",
            'return batch.to_device("cpu")',
        ),
        Mistake("a debugger", in_batch("stops_in_a_debugger"), WorkerError, "`use_local=True`"),
        Mistake("nothing returned", in_batch("returns_nothing"), TypeError, "`Careless.train_batch` returned"),
        Mistake(
            "the end of a program", in_batch("leaves_the_program"), WorkerError, "SystemExit: 3", "raise SystemExit(3)"
        ),
        Mistake(
            "a key",
            in_setup("reads_a_missing_key"),
            KeyError,
            "learning_rat",
            'self.rate = config["learning_rat"]',
        ),
        Mistake(
            "a process of a loader",
            lambda trainer: (trainer.reset_config({"mistake": "has_a_broken_loader"}), trainer.train()),
            IndexError,
            "out of bounds",
            "return dataset(1)[7]",
        ),
    )
}


REPLACED = ("a method, on one rank", "a key", "a process of a loader")
"""Those over which workers end: others are inside of the call, or are to be set up again."""


@pytest.mark.parametrize("name", [name for name in TABLE if name not in REPLACED])
def test_a_mistake_on_two_workers_is_said_once(name: str, trainer: TorchTrainer[Any]) -> None:
    check(TABLE[name], trainer)
    assert trainer.train()["num_samples"] == 20


@pytest.mark.soak
@pytest.mark.parametrize("name", REPLACED)
def test_a_mistake_that_costs_workers_is_said_once(name: str, ray_cluster: None) -> None:
    with TorchTrainer(Careless, **OPTIONS) as trainer:
        check(TABLE[name], trainer)
        trainer.reset_config({})
        assert trainer.train()["num_samples"] == 20
