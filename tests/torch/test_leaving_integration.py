"""Runs on real workers that a signal leaves inside an epoch, and that go on there with as many workers as there are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd
from raysgd import Recovery, testing
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, Run
from raysgd.core.history.history import History
from raysgd.core.numbers.results import CallProgress
from raysgd.journal.journal import Journal
from raysgd.torch import TorchTrainer
from raysgd.trainer.driver.fit_epoch import StepReports
from tests.helpers.doors import controller_of
from tests.torch.gate import WaitsForSignal, waiting_for_signal
from tests.torch.ledger import Ledger, uses
from tests.torch.operators_for_tests import LinearOperator, OwnEpochOperator
from tests.torch.streamed import StreamOperator

pytestmark = pytest.mark.integration

NUM_EPOCHS = 3
CONFIG = {"num_samples": 192, "batch_size": 12}  # 16 steps an epoch


class Told(Callback):
    """Gets a signal for the program in an epoch, behind a step at which workers wait, and may kill some just before."""

    def __init__(
        self,
        epoch: int,
        step: int,
        kills: tuple[int, ...] = (),
        *,
        awaits_snapshot: bool = False,
        steps_of_epoch: int = 16,
    ) -> None:
        self.epoch, self.step, self.kills, self.awaits_snapshot = epoch, step, kills, awaits_snapshot
        self.num_steps = (epoch - 1) * steps_of_epoch + step
        self._stack = ExitStack()

    def on_run_begin(self, run: Run) -> None:
        self.gate = self._stack.enter_context(waiting_for_signal(run.trainer, self.num_steps))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._stack.close()

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        if run.epoch != self.epoch or progress.num_steps < self.step or progress.kind != "train":
            return
        if self.awaits_snapshot and not controller_of(run.trainer).snapshots.is_inside:
            return
        self.epoch = 0
        if self.kills:
            testing.kill_worker(run.trainer, self.kills)
            self.gate.unlink()
        signal.raise_signal(signal.SIGTERM)


class GatedLedger(WaitsForSignal, Ledger): ...


Make = Callable[..., TorchTrainer]


@pytest.fixture(scope="module")
def make(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make a trainer whose workers can wait for the signal."""
    gate = str(tmp_path_factory.mktemp("gate") / "gate")

    def make(num_workers: int, operator_cls: Any = GatedLedger, **options: Any) -> TorchTrainer:
        given = {"split_batches": True, "num_cpus_per_worker": 0.5, "seed": 3, **options}
        config = {**options.get("config", CONFIG), "gate": gate}
        return TorchTrainer(training_operator_cls=operator_cls, num_workers=num_workers, **{**given, "config": config})

    return make


def fit(trainer: TorchTrainer, folder: Path, *callbacks: Callback) -> History:
    saving = [Checkpointing(folder / "files"), CSVLogger(folder / "metrics.csv")]
    return trainer.fit(NUM_EPOCHS, callbacks=[*callbacks, *saving], resume_from="auto", folder=folder)


def leave(trainer: TorchTrainer, folder: Path, *callbacks: Callback) -> str:
    """Return the file that a run which is left has written."""
    with pytest.raises(raysgd.Preempted) as raised:
        fit(trainer, folder, *callbacks)
    assert raised.value.checkpoint is not None
    return Path(raised.value.checkpoint).name


def told_of(history: History) -> list[tuple[Any, ...]]:
    return [(row["epoch"], row["num_samples"], row["batch_count"]) for row in history]


@pytest.fixture(scope="module")
def whole(make: Make, tmp_path_factory: pytest.TempPathFactory) -> History:
    """The run that nothing disturbs."""
    with make(2) as trainer:
        return fit(trainer, tmp_path_factory.mktemp("whole"))


def test_a_run_goes_on_at_the_next_sample_with_any_number_of_workers(
    make: Make, whole: History, tmp_path: Path
) -> None:
    names = []
    for num_workers, told in ((3, Told(1, 5)), (2, Told(2, 4)), (4, Told(3, 6))):
        with make(num_workers) as trainer:
            names.append(leave(trainer, tmp_path, told))
    assert [name[:16] for name in names] == ["epoch_0000_step_", "epoch_0001_step_", "epoch_0002_step_"]
    with make(2) as trainer:
        history = fit(trainer, tmp_path)
        assert uses(trainer) == {NUM_EPOCHS}
    assert told_of(history) == told_of(whole)
    assert history["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    assert history["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-5)


@pytest.mark.parametrize("kills", [(1,), (0,)])
def test_no_step_is_lost_where_a_worker_dies_beside_the_signal(
    kills: tuple[int, ...], make: Make, whole: History, tmp_path: Path
) -> None:
    with make(2) as trainer:
        name = leave(trainer, tmp_path, Told(2, 6, kills))
    assert name.startswith("epoch_0001_step_"), "not behind the step of the signal"
    assert int(name[16:22]) >= 6
    with make(2) as trainer:
        history = fit(trainer, tmp_path)
        assert uses(trainer) == {NUM_EPOCHS}
    assert told_of(history) == told_of(whole)


@pytest.mark.parametrize("every", [None, 2], ids=["the last file", "the newest snapshot"])
def test_what_the_driver_holds_is_written_where_all_workers_die(
    every: int | None, make: Make, whole: History, tmp_path: Path
) -> None:
    with make(2, recovery=Recovery(snapshot_every_n_steps=every)) as trainer:
        name = leave(trainer, tmp_path, Told(2, 9, (0, 1), awaits_snapshot=every is not None))
        assert not any(event.kind in ("restored", "continued") for event in trainer.history.events)
    assert name.startswith("epoch_0001_step_0000" if every else "epoch_0001.ckpt")
    with make(2) as trainer:
        history = fit(trainer, tmp_path)
        assert uses(trainer) == {NUM_EPOCHS}
    assert told_of(history) == told_of(whole)


def test_saves_inside_epochs_survive_a_lost_worker_and_change_nothing(
    make: Make, whole: History, tmp_path: Path
) -> None:
    with make(2) as trainer:
        testing.kill_worker(trainer, 1, at="step:9")
        saving = Checkpointing(tmp_path, every_n_steps=5, keep_last=None)
        history = trainer.fit(NUM_EPOCHS, callbacks=[saving])
        assert uses(trainer) == {NUM_EPOCHS}
        assert any(event.is_failure for event in trainer.history.events)
    assert told_of(history) == told_of(whole)
    names = sorted(path.name for path in tmp_path.glob("*_step_*.ckpt"))
    assert names == [
        f"epoch_{step // 16:04d}_step_{step % 16:06d}.ckpt" for step in range(5, 16 * NUM_EPOCHS, 5) if step % 16
    ]


class Steps(Callback):
    """Notes at which steps it is told of means, and how far the run was left."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.left_at = 0

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def on_leave(self, run: Run) -> None:
        self.left_at = run.step


def test_the_last_step_is_in_the_records_of_a_run_that_is_left_where_a_worker_answers_late(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, steps = StepReports.fetch, Steps()

    def fetch_late(reports: StepReports) -> None:
        """Let the machine of a worker stop for a while, as soon as the step is over."""
        pid = trainer.worker_group.infos[1].pid
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(2.5, os.kill, (pid, signal.SIGCONT))
        timer.start()
        fetch(reports)
        timer.join()

    monkeypatch.setattr(StepReports, "fetch", fetch_late)
    with make(2) as trainer, pytest.raises(raysgd.Preempted):
        trainer.fit(1, callbacks=[Told(1, 5), steps], folder=tmp_path, log_every_n_steps=1)
    assert 5 <= steps.left_at < 16
    assert steps.steps == list(range(1, steps.left_at + 1))
    assert Journal(tmp_path).numbers() == steps.steps
    assert set(Journal(tmp_path).steps["weight"]) == {12.0}, "both workers have told of each step"


class SlowValidation(GatedLedger):
    def validate_batch(self, batch: Any, info: dict[str, Any]) -> Any:
        time.sleep(0.3)
        return super().validate_batch(batch, info)


class ToldInValidation(Callback):
    """Gets a signal for the program in the validation of an epoch, in which all workers die."""

    epoch = 2

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        if run.epoch == self.epoch and progress.kind == "validation":
            self.epoch = 0
            signal.raise_signal(signal.SIGTERM)
            testing.kill_worker(run.trainer, (0, 1))


class ToldInCallback(Callback):
    """Gets a signal for the program behind an epoch, and makes a call of its own, in which all workers die."""

    def on_epoch_trained(self, run: Run) -> None:
        if run.epoch == 2:
            testing.kill_worker(run.trainer, (0, 1))
            signal.raise_signal(signal.SIGTERM)
            run.trainer.apply_all_operators(lambda operator: None)


@pytest.mark.parametrize("told", [ToldInValidation, ToldInCallback])
def test_an_epoch_that_the_driver_holds_is_not_lost_where_all_workers_die_behind_it(
    told: type[Callback], make: Make, whole: History, tmp_path: Path
) -> None:
    with make(2, SlowValidation, recovery=Recovery(snapshot_every_s=0)) as trainer:
        assert leave(trainer, tmp_path, told()) == "epoch_0002.ckpt"
        assert [event.kind for event in trainer.history.events] == ["started", "ended"], "no worker was replaced"
    with make(2) as trainer:
        history = fit(trainer, tmp_path)
        assert uses(trainer) == {NUM_EPOCHS}
    assert told_of(history) == told_of(whole)
    assert history["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-5)


class GatedLinear(WaitsForSignal, LinearOperator): ...


def test_divided_models_are_left_at_a_step_too(make: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "config": {"num_samples": 96, "optimizer": "adam"},  # 12 steps
        "strategy": "fsdp",
        "split_batches": False,
    }
    with make(2, GatedLinear, **options) as trainer:
        wanted = fit(trainer, tmp_path / "whole")
        state = trainer.state_dict()["models"][0]
    with make(2, GatedLinear, **options) as trainer:
        assert "_step_" in leave(trainer, tmp_path / "left", Told(2, 4, steps_of_epoch=12))
    with make(2, GatedLinear, **options) as trainer:
        history = fit(trainer, tmp_path / "left")
        found = trainer.state_dict()["models"][0]
    assert told_of(history) == told_of(wanted)
    assert history["train_loss"] == wanted["train_loss"]
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=0)


class GatedStream(WaitsForSignal, StreamOperator): ...


def test_a_stream_goes_on_at_the_next_row(make: Make, tmp_path: Path) -> None:
    config = {"kind": "shuffled"}
    with make(2, GatedStream, config=config) as trainer:
        wanted = fit(trainer, tmp_path / "whole")
        state = trainer.state_dict()["models"][0]
    for num_workers, told in ((2, Told(1, 8)), (3, Told(2, 8, steps_of_epoch=24))):
        with make(num_workers, GatedStream, config=config) as trainer:
            leave(trainer, tmp_path / "left", told)
    with make(2, GatedStream, config=config) as trainer:
        history = fit(trainer, tmp_path / "left")
        found = trainer.state_dict()["models"][0]
    assert told_of(history) == told_of(wanted)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=0)


class SlowEpoch(OwnEpochOperator):
    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        def slowly() -> Any:
            for number, batch in enumerate(iterator):
                time.sleep(0.1 if number < 5 else 0.5)
                yield batch

        return super().train_epoch(slowly(), info)


def test_an_epoch_that_cannot_be_held_is_broken_off_at_once(make: Make, tmp_path: Path) -> None:
    with make(2, SlowEpoch, config={"num_samples": 400, "batch_size": 4}) as trainer:
        name = leave(trainer, tmp_path, Told(1, 4))
    assert name == "epoch_0000.ckpt", "the state before it, which the driver holds"
