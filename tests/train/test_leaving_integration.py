"""Training functions whose program gets a signal: they are told, and their next checkpoint ends the run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import raysgd
from raysgd.air.config import CheckpointConfig
from raysgd.core.engine.transfers import transfer
from raysgd.train import RunConfig, ScalingConfig, Trainer, TrainingCallback, _function_run
from raysgd.train.backend import BackendConfig
from raysgd.train.checkpoint import CheckpointLostError
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from tests.helpers.ray_start import UNDER_TIMEOUT
from tests.helpers.run_if import RunIf
from tests.train import left_functions
from tests.train.left_functions import notes

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

ROOT = Path(__file__).resolve().parents[2]


class SendsSignal(TrainingCallback):
    """Sends the program a signal at a report, and keeps what the run was ended with."""

    def __init__(self, at: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.at, self.number = at, number
        self.ended: list[bool] = []

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if results[0]["step"] == self.at:
            signal.raise_signal(self.number)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.ended.append(error)


def leave(folder: Path, sends: SendsSignal, function: Any = left_functions.train_in_steps, **config: Any) -> Path:
    """Run a function that a signal ends; return the file of its checkpoint."""
    strategy = config.pop("strategy", None)
    config = {"folder": str(folder), "num_steps": 20, "save_every": 1000, **config}
    trainer = Trainer(BackendConfig(), 2, logdir=folder / "logs", resources_per_worker={"CPU": 0.5})
    trainer.start()
    try:
        with pytest.raises(raysgd.Preempted) as raised:
            trainer.run(function, config, callbacks=[sends], checkpoint_strategy=strategy)
    finally:
        trainer.shutdown()
    assert sends.ended == [True]
    assert raised.value.code == 128 + sends.number
    return Path(raised.value.checkpoint or "none")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_functions_that_ask_are_told_on_all_ranks_and_the_next_run_goes_on_with_the_next_step(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    file = leave(tmp_path, SendsSignal(at=6, number=number), asks=True)
    assert signal.getsignal(number) == before
    config = {"folder": str(tmp_path), "num_steps": 20, "save_every": 1000}
    trainer = Trainer(BackendConfig(), 2, logdir=tmp_path / "logs", resources_per_worker={"CPU": 0.5})
    trainer.start()
    try:
        assert trainer.run(left_functions.train_in_steps, config, checkpoint=file) == ["done", "done"]
    finally:
        trainer.shutdown()
    for rank in range(2):
        assert notes(tmp_path, rank, "step") == [str(step) for step in range(20)], "none is lost, none is repeated"
        assert notes(tmp_path, rank, "info") == ["([0, 1], True)"]


def test_of_functions_that_do_not_ask_the_next_checkpoint_is_kept_even_if_it_is_not_one_of_the_best(
    tmp_path: Path,
) -> None:
    strategy = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    file = leave(tmp_path, SendsSignal(at=7), save_every=5, strategy=strategy)
    assert Trainer.load_checkpoint_from_path(file)["step"] == 9
    assert notes(tmp_path, 0, "step")[-1] == "9", "it ends there"


def test_functions_that_do_not_save_in_time_end_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_function_run, "LEAVING_S", 0.5)
    file = leave(tmp_path, SendsSignal(at=3), num_steps=10_000)
    assert file == Path("none")
    assert len(notes(tmp_path, 0, "step")) < 10_000


def test_lost_workers_are_not_replaced_any_more_and_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    file = leave(tmp_path, SendsSignal(at=0), left_functions.die_beside_the_signal)
    assert Trainer.load_checkpoint_from_path(file)["step"] == 0
    assert notes(tmp_path, 0, "told") == ["True"], "the function was not started again"


def test_a_checkpoint_on_its_way_is_lost_only_where_ray_was_stopped_and_the_program_ends() -> None:
    coming = transfer(ray.remote(num_cpus=0)(lambda: time.sleep(1000.0)).remote())
    with pytest.raises(CheckpointLostError, match="Ray was stopped"):
        _function_run.arrived(coming, lambda: True, lambda: True)
    ray.cancel(coming.reference, force=True)
    sent = transfer(ray.remote(num_cpus=0)(lambda: {"step": 1}).remote())
    is_cut_off = itertools.chain([True], itertools.repeat(False))
    assert _function_run.arrived(sent, lambda: next(is_cut_off), lambda: False) == {"step": 1}


def fit_trainer(folder: Path, callbacks: Any = (), **config: Any) -> DataParallelTrainer:
    return DataParallelTrainer(
        left_functions.fit_in_steps,
        train_loop_config={"folder": str(folder), "num_steps": 20, "save_every": 1000, **config},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(folder), name="run", callbacks=list(callbacks)),
    )


class SendsInFit(raysgd.callbacks.Callback):
    """Sends the program a signal at a report."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_result(self, run: Any, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.at:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("returns", [False, True])
def test_fit_ends_at_the_next_checkpoint_and_is_restored_with_each_report_once(returns: bool, tmp_path: Path) -> None:
    with pytest.raises(raysgd.Preempted) as raised:
        fit_trainer(tmp_path, [SendsInFit(6)], returns=returns, save_every=4 if returns else 1000).fit()
    assert raised.value.checkpoint is not None
    assert Path(raised.value.checkpoint).is_dir()
    config = {"folder": str(tmp_path), "num_steps": 20, "save_every": 1000}
    run_config = RunConfig(storage_path=str(tmp_path), name="run")
    result = DataParallelTrainer.restore(tmp_path / "run", train_loop_config=config, run_config=run_config).fit()
    assert result.metrics["step"] == 19
    if not returns:  # otherwise it goes on from an older checkpoint
        for rank in range(2):
            assert notes(tmp_path, rank, "step") == [str(step) for step in range(20)]
        reports = [json.loads(line) for line in Path(result.path, "result.json").read_text().splitlines()]
        assert [each["step"] for each in reports] == list(range(20))
        assert [each["training_iteration"] for each in reports] == list(range(1, 21))


def test_a_run_that_has_ended_when_the_signal_comes_is_done(tmp_path: Path) -> None:
    with pytest.raises(raysgd.Preempted):
        fit_trainer(tmp_path, [SendsInFit(19)]).fit()
    restored = DataParallelTrainer.restore(tmp_path / "run")
    assert restored.fit().metrics["step"] == 19
    assert notes(tmp_path, 0, "step") == [str(step) for step in range(20)], "the second one had nothing to do"


@pytest.mark.program
@RunIf(programs=["timeout"])
def test_a_program_under_timeout_is_done_some_day_and_repeats_only_what_no_checkpoint_has(tmp_path: Path) -> None:
    """`timeout` sends the signal to all processes of the program, Ray's own included.

    On a busy machine, Ray may end before the workers have reported their checkpoint. Only then are steps repeated.
    """
    program = [sys.executable, "-m", "tests.train.left_program", str(tmp_path)]
    statuses, seconds = [], 8.0
    while not (tmp_path / "done").exists() and len(statuses) < 8:
        command = ["timeout", "-s", "TERM", str(seconds), *program]
        statuses.append(subprocess.call(command, cwd=ROOT, env={**os.environ, **UNDER_TIMEOUT}))
        seconds += 6.0  # on a busy machine the start alone may take as long
    assert 124 in statuses, "it was ended at least once"
    assert (tmp_path / "done").read_text() == "59"
    saved = [raysgd.air.Checkpoint.from_directory(file.parent) for file in tmp_path.rglob("dict_checkpoint.pkl")]
    may_begin_at = {0, *(checkpoint.to_dict()["step"] + 1 for checkpoint in saved)}
    for rank in range(2):
        steps = [int(step) for step in notes(tmp_path, rank, "step")]
        assert list(dict.fromkeys(steps)) == list(range(60)), "no step is left out"
        assert {step for last, step in itertools.pairwise(steps) if step != last + 1} <= may_begin_at
