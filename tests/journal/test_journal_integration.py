"""The journal of runs on several workers, some of which are killed or stop: it is that of a calm run.

Covers `raysgd.journal.keeper` and `raysgd.journal.recorder`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.cloudpickle

from raysgd import Recovery
from raysgd.callbacks import Callback, Checkpointing, Run
from raysgd.exceptions import WorkerError
from raysgd.journal.journal import Journal
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer
from tests.torch import operators_for_tests
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration

OPTIONS: dict[str, Any] = {
    "training_operator_cls": LinearOperator,
    "use_gpu": False,
    "num_cpus_per_worker": 0.5,
    "clip_grad_norm": 1.0,
    "config": {"num_samples": 96, "batch_size": 12, "shuffle": True},
}


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    for module in (operators_for_tests, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in (operators_for_tests, sys.modules[__name__]):
        ray.cloudpickle.unregister_pickle_by_value(module)


class Kill(Callback):
    """Kills a rank in the second epoch."""

    def __init__(self, rank: int, at: str) -> None:
        self.rank, self.at = rank, at

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 1:
            kill_worker(run.trainer, self.rank, at=self.at)


def journal_of(folder: Path, *callbacks: Any, epochs: int = 3, resume: bool = False, **options: Any) -> Journal:
    resume_from = {"resume_from": "auto"} if resume else {}
    with TorchTrainer(**{**OPTIONS, **options}) as trainer:
        trainer.fit(epochs, callbacks=callbacks, folder=folder, **resume_from)
    return Journal(folder)


@pytest.mark.parametrize("in_place", [True, False])
def test_steps_that_are_trained_again_replace_the_earlier_ones(
    ray_cluster: None, tmp_path: Path, in_place: bool
) -> None:
    options: dict[str, Any] = {"deterministic": True, "split_batches": True, "num_workers": 3}
    calm = journal_of(tmp_path / "calm", **options)
    recovery = Recovery(in_place=in_place, wait_for_workers=False, resize_interval_s=600.0)
    killed = journal_of(tmp_path / "killed", Kill(1, "step:4"), **options, recovery=recovery)
    assert killed.numbers() == calm.numbers() == list(range(1, 25))
    assert np.array_equal(killed.steps["norm"], calm.steps["norm"]), "each rank knows the norm"
    whole = killed.steps["weight"] == calm.steps["weight"]
    assert np.array_equal(killed.steps["loss"][whole], calm.steps["loss"][whole])
    # What the lost worker had not told goes with it: at most the steps of its last epoch until then.
    assert set(np.flatnonzero(~whole) + 1) <= {9, 10, 11, 12}
    begun = [(leg.after, leg.num_workers) for leg in killed.legs]
    assert begun[:2] == [(0, 3), (8, 3)]
    assert begun[-1][0] == 16
    assert ((12, 2) in begun) == in_place, "otherwise the epoch begins again, on new workers"


def test_a_run_that_resumes_inside_an_epoch_on_fewer_workers_has_the_same_journal(
    ray_cluster: None, tmp_path: Path
) -> None:
    class StopInside(Checkpointing):
        """Ends the run at its first save inside an epoch, as a program that dies there."""

        def _on_pause(self, run: Run, global_step: int) -> None:
            super()._on_pause(run, global_step)
            raise RuntimeError("the program dies")

    options: dict[str, Any] = {"split_batches": True}
    calm = journal_of(tmp_path / "calm", **options, num_workers=2)
    with pytest.raises(RuntimeError, match="the program dies"):
        journal_of(tmp_path / "left", StopInside(every_n_steps=11), **options, num_workers=3)
    left = Journal(tmp_path / "left")
    assert left.last_step == 11
    assert left.checkpoints[11] == "checkpoints/epoch_0001_step_000003.ckpt"
    resumed = journal_of(tmp_path / "left", Checkpointing(), **options, num_workers=2, resume=True)
    assert [(leg.after, leg.num_workers) for leg in resumed.legs] == [(0, 3), (8, 3), (11, 2), (16, 2)]
    assert resumed.legs[2].consumed == 36
    assert resumed.numbers() == calm.numbers() == list(range(1, 25))
    assert resumed.steps["loss"] == pytest.approx(calm.steps["loss"], rel=1e-5)
    assert np.array_equal(resumed.steps["weight"], calm.steps["weight"])


class Fails(LinearOperator):
    """Fails in the third batch of the second epoch, on all ranks, so that the workers are kept."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == 10:
            raise RuntimeError("a bad row")
        return super().train_batch(batch, batch_info)


def test_the_steps_before_an_error_are_kept(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="a bad row"):
        journal_of(tmp_path, training_operator_cls=Fails, num_workers=2, split_batches=True)
    journal = Journal(tmp_path)
    assert journal.numbers() == list(range(1, 11))
    assert {journal.check_step(step).weight for step in journal.numbers()} == {12.0}
