"""`fit` with `max_steps` and `validate_every_n_steps`, and saves behind the training: one worker, in this process.

Covers `raysgd.trainer.driver.fit_epoch` and `raysgd.trainer.driver.fit_loop`. Workers that are held and lost are in
`tests/torch/test_inside_epochs_integration.py`.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from raysgd.callbacks import Callback, Checkpointing, CSVLogger, EarlyStopping, HTMLReport, ProgressBar, Run
from raysgd.callbacks.checkpointing import INDEX_FILE
from raysgd.core.history.history import History
from raysgd.exceptions import CallbackError, InvalidCountError
from raysgd.storage import files
from raysgd.testing import fail_save
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.operators_for_tests import DropoutOperator, LinearOperator, ScheduledOperator, dataset, equal

Make = Callable[..., TorchTrainer]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"num_samples": 40, "shuffle": True, "optimizer": "adam"}  # 10 batches an epoch


class Op(ScheduledOperator, DropoutOperator):
    """Draws random numbers, and has a scheduler."""


class Measures(Op):
    """Uses one metric object in training and in validation, and draws from all generators in validation."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.error = torchmetrics.MeanSquaredError()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        return {**super().train_batch(batch, batch_info), "error": self._measured(batch)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        torch.rand(7), random.random(), np.random.random()
        return {**super().validate_batch(batch, batch_info), "error": self._measured(batch)}

    def _measured(self, batch: Any) -> torchmetrics.Metric:
        features, _, target = batch
        self.error.update(features[:, :1].contiguous(), target)
        return self.error


class Notes(Callback):
    """Notes what a callback is told, in its order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def steps(self) -> list[int]:
        return [call[3] for call in self.calls if call[0] == "validation"]

    def on_epoch_begin(self, run: Run) -> None:
        self.calls.append(("epoch", run.epoch, run.step))

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        assert metrics["val_loss"] > 0
        self.calls.append(("validation", run.epoch, run.step, step))

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.calls.append(("result", run.epoch, run.step))

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.calls.append(("checkpoint", Path(checkpoint).name))

    def on_leave(self, run: Run) -> None:
        self.calls.append(("leave", run.epoch, run.step))


def started(make: Make, operator_cls: type[TrainingOperator] = Op, **config: Any) -> TorchTrainer:
    return make(operator_cls, config={**CONFIG, **config}, scheduler_step_freq="batch", seed=5)


def without_times(history: History) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


# -------------------------------------------------------------------------------------------------- validations


@pytest.mark.parametrize("operator_cls", [Op, Measures])
@pytest.mark.parametrize("every", [1, 3])
def test_a_validation_inside_changes_no_bit_of_the_training(
    every: int, operator_cls: type[TrainingOperator], make_local: Make
) -> None:
    def run(*callbacks: Callback, **options: Any) -> tuple[Any, ...]:
        trainer = started(make_local, operator_cls)
        history = trainer.fit(3, callbacks=callbacks, **options)
        rows = without_times(history)
        errors = [row.pop("error", 0.0) for row in rows]
        return rows, trainer.state_dict(), trainer.train()["train_loss"], errors

    wanted, notes = run(), Notes()
    found = run(notes, validate_every_n_steps=every)
    assert notes.steps == [step for step in range(every, 30, every) if step % 10]
    assert found[0] == wanted[0]
    assert equal(found[1], wanted[1])
    assert found[2] == wanted[2]
    assert found[3] == pytest.approx(wanted[3]), "torchmetrics adds up its parts in float32"


def test_metric_objects_cover_the_whole_epoch_in_one_process_and_else_a_warning_says_so(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = started(make_local, Measures).fit(1)
    saving: Any = {"callbacks": [Checkpointing(tmp_path)]}
    trainer = started(make_local, Measures)
    trainer.fit(max_steps=4, **saving)
    assert trainer.fit(max_steps=6)["error"] == pytest.approx(wanted["error"])
    assert "will cover only what follows" not in caplog.text
    history = started(make_local, Measures).fit(1, resume_from="auto", **saving)
    assert history["train_loss"] == wanted["train_loss"]
    assert history["error"] != pytest.approx(wanted["error"])
    assert "the metric object `error` will cover only what follows in this epoch" in caplog.text
    assert "which has 0 epochs and 4 batches of the next one" in caplog.text


class KeepsItself(Measures):
    """Measures without reporting, as programs that compute the value themselves at the end of an epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.counts: list[int] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        metrics = super().train_batch(batch, batch_info)
        return {name: value for name, value in metrics.items() if name != "error"}

    def validate(self, iterator: Any, info: Any = None) -> Any:
        self.counts.append(self.error.update_count)
        return super().validate(iterator, info)


def test_a_metric_object_that_is_kept_over_the_epoch_sees_nothing_of_validations_inside(make_local: Make) -> None:
    trainer = started(make_local, KeepsItself)
    trainer.fit(max_steps=8, validate_every_n_steps=3)
    operator = trainer.get_local_operator()
    assert operator.counts == [0, 0], "and they see nothing of the epoch"
    assert operator.error.update_count == 8


def test_callbacks_and_records_are_told_the_step_and_rows_stay_one_for_each_epoch(make_local: Make) -> None:
    trainer, notes = started(make_local), Notes()
    history = trainer.fit(2, callbacks=[notes], validate_every_n_steps=5, validation_freq=2)
    assert notes.calls == [
        ("epoch", 0, 0),
        ("validation", 0, 5, 5),
        ("validation", 0, 10, 10),  # the epoch has none of its own
        ("result", 1, 0),
        ("epoch", 1, 0),
        ("validation", 1, 5, 15),
        ("result", 2, 0),
    ]
    assert ["val_loss" in row for row in history] == [False, True]
    for each in (history, trainer.history, History.from_json(history.to_json())):
        assert len(each) == 2
        told = [(record.kind, record.epoch, record.step) for record in each.records]
        assert told == [
            ("validation", 1, 5),
            ("validation", 1, 10),
            ("train", 1, 0),
            ("validation", 2, 15),
            ("train", 2, 0),
            ("validation", 2, 0),
        ]


def test_steps_of_several_batches_are_validated_whole(make_local: Make) -> None:
    class Accumulates(Op):
        def accumulate_grad_batches(self, epoch_idx: int) -> int:
            return 4

    whole, notes = started(make_local, Accumulates), Notes()
    whole.fit(2)
    trainer = started(make_local, Accumulates)
    trainer.fit(2, callbacks=[notes], validate_every_n_steps=3)
    assert notes.steps == [4, 8, 14, 18]  # windows are 4, 4, 2
    assert equal(trainer.state_dict(), whole.state_dict())


class Worse(Op):
    """Its validation has a higher loss each time, on a scale of its own."""

    num_validations = 0

    def validate(self, iterator: Any, info: Any = None) -> Any:
        result = super().validate(iterator, info)
        self.num_validations += 1
        return {**result, "val_loss": float(self.num_validations)}


def test_early_stopping_counts_validations_and_ends_the_run_at_the_step(make_local: Make, tmp_path: Path) -> None:
    def run(*callbacks: Callback) -> History:
        trainer, saving = started(make_local, Worse), Checkpointing(tmp_path, metric="val_loss")
        options: dict[str, Any] = {"validate_every_n_steps": 3, "resume_from": "auto"}
        return trainer.fit(5, callbacks=[EarlyStopping(patience=3), saving, *callbacks], **options)

    notes = Notes()
    history = run(notes)
    assert notes.steps == [3, 6, 9]
    assert history.stop_reason is not None
    assert history.stop_reason.startswith("no improvement of `val_loss` for 3 results; the best one was 1 in epoch 1")
    assert len(history) == 1
    assert ("leave", 1, 0) not in notes.calls, "the fourth result was the one of the epoch"
    again = Notes()
    history = run(again)
    assert again.calls == [], "its counts already call for the end"
    assert history.stop_reason is not None


def test_early_stopping_inside_an_epoch_saves_that_step(make_local: Make, tmp_path: Path) -> None:
    trainer, notes = started(make_local, Worse), Notes()
    saving = Checkpointing(tmp_path, metric="val_loss")
    callbacks = [EarlyStopping(patience=2), saving, notes]
    history = trainer.fit(5, callbacks=callbacks, validate_every_n_steps=3)
    assert notes.steps == [3, 6, 9]
    assert len(history) == 0
    assert notes.calls[-2:] == [("leave", 0, 9), ("checkpoint", "epoch_0000_step_000009.ckpt")]
    saved = json.loads((tmp_path / INDEX_FILE).read_text())["saved"]
    assert [(each["name"], each["score"]) for each in saved] == [("epoch_0000_step_000009.ckpt", 3.0)]
    notes = Notes()
    other = started(make_local, Worse)
    callbacks = [EarlyStopping(patience=2), Checkpointing(tmp_path, metric="val_loss"), notes]
    history = other.fit(5, callbacks=callbacks, validate_every_n_steps=3, resume_from="auto")
    assert not notes.calls
    assert str(history.stop_reason).startswith("no improvement")


def test_a_misspelt_metric_is_named_at_the_first_validation(make_local: Make) -> None:
    with pytest.raises(CallbackError, match=r"there is no such metric\. Did you mean `val_loss`"):
        started(make_local).fit(1, callbacks=[EarlyStopping("val_los")], validate_every_n_steps=3)


def test_a_metric_of_training_waits_for_the_end_of_the_epoch(make_local: Make, tmp_path: Path) -> None:
    callbacks = [EarlyStopping("train_loss"), Checkpointing(tmp_path, metric="train_loss", every_n_steps=3)]
    assert len(started(make_local).fit(2, callbacks=callbacks, validate_every_n_steps=3)) == 2


def test_files_at_steps_of_validations_may_be_the_best(make_local: Make, tmp_path: Path) -> None:
    trainer = started(make_local, Worse)
    saving = Checkpointing(tmp_path, every_n_steps=6, metric="val_loss", restore_best_at_end=True)
    trainer.fit(2, callbacks=[saving], validate_every_n_steps=3)
    assert saving.best == str(tmp_path / "epoch_0000_step_000006.ckpt")
    assert saving.best_score == 2.0, "no file was saved at the first validation, at step 3"
    assert trainer.get_local_operator().global_step == 6


class Plateau(LinearOperator):
    def register(self, **parts: Any) -> Any:
        make = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.99)
        *others, self.scheduler = super().register(**parts, schedulers=make(parts["optimizers"]))
        return others


def test_a_plateau_follows_only_the_validations_at_the_ends_of_epochs(make_local: Make) -> None:
    states = []
    for every in (None, 2):
        trainer = make_local(Plateau, config=CONFIG, scheduler_step_freq="epoch", seed=5)
        trainer.fit(3, validate_every_n_steps=every)
        states.append(trainer.get_local_operator().scheduler.state_dict())
    assert states[0] == states[1]
    assert states[0]["last_epoch"] == 3


def test_validations_inside_are_shown(make_local: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = HTMLReport(tmp_path / "report.html")
    callbacks = [report, CSVLogger(tmp_path / "metrics.csv"), ProgressBar()]
    started(make_local).fit(2, callbacks=callbacks, validate_every_n_steps=4, log_every_n_steps=4)
    lines = [line.split(",") for line in (tmp_path / "metrics.steps.csv").read_text().splitlines()]
    loss = lines[0].index("val_loss")
    assert [(line[0], line[1]) for line in lines[1:] if line[loss]] == [
        ("1", "4"),
        ("1", "8"),
        ("2", "12"),
        ("2", "16"),
    ]
    assert '"step": 12, "val_loss"' in (tmp_path / "report.html").read_text()
    shown = [line.split()[:4:2] for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert shown == [["step", "val_loss"]] * 4


# ---------------------------------------------------------------------------------------------------- max_steps


@pytest.mark.parametrize("max_steps", [1, 7, 10, 14, 20])
def test_a_run_ends_at_its_step_and_the_next_one_is_the_whole(max_steps: int, make_local: Make, tmp_path: Path) -> None:
    whole = started(make_local)
    wanted = whole.fit(3, callbacks=[CSVLogger(tmp_path / "whole.csv")], log_every_n_steps=3)

    def run(total: int) -> tuple[TorchTrainer, History, Notes]:
        trainer, notes = started(make_local), Notes()
        callbacks = [notes, CSVLogger(tmp_path / "left.csv"), Checkpointing(tmp_path / "files")]
        return (
            trainer,
            trainer.fit(max_steps=total, callbacks=callbacks, resume_from="auto", log_every_n_steps=3),
            notes,
        )

    trainer, history, notes = run(max_steps)
    assert trainer.get_local_operator().global_step == max_steps
    assert history.stop_reason is None, "it has all that was asked for"
    assert len(history) == max_steps // 10
    assert ("leave", max_steps // 10, max_steps % 10) in notes.calls or max_steps % 10 == 0
    name = f"epoch_{max_steps // 10:04d}{f'_step_{max_steps % 10:06d}' if max_steps % 10 else ''}.ckpt"
    assert notes.calls[-1] == ("checkpoint", name)
    trainer, history, notes = run(30)
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)
    steps = [(tmp_path / f"{name}.steps.csv").read_text() for name in ("left", "whole")]
    assert steps[0] == steps[1]


def test_a_resumed_run_that_has_its_steps_trains_nothing_and_says_so(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        trainer, notes = started(make_local), Notes()
        callbacks = [notes, Checkpointing(tmp_path)]
        history = trainer.fit(max_steps=14, callbacks=callbacks, resume_from="auto")
        assert trainer.get_local_operator().global_step == 14
    assert notes.calls == []
    assert len(history) == 1
    assert "has 14 of 14 steps, so none is left to train. For more of them pass a larger `max_steps`" in caplog.text


def test_without_a_file_to_resume_from_steps_are_more_and_an_epoch_goes_on_in_its_row(make_local: Make) -> None:
    whole = started(make_local)
    wanted = whole.fit(2)
    trainer, rows = started(make_local), []
    for max_steps in (4, 2, 9, 5):
        rows += without_times(trainer.fit(max_steps=max_steps))
    assert equal(trainer.state_dict(), whole.state_dict())
    assert rows == without_times(wanted)


class FailsOnce(Notes):
    fails = True

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        super().on_validation(run, step, metrics)
        if self.fails:
            self.fails = False
            raise RuntimeError("a mistake")


def test_an_epoch_goes_on_in_its_row_after_a_callback_has_failed_in_it(make_local: Make) -> None:
    whole = started(make_local)
    wanted = whole.fit(2)
    trainer, callback = started(make_local), FailsOnce()
    with pytest.raises(CallbackError, match="a mistake"):
        trainer.fit(2, callbacks=[callback], validate_every_n_steps=4)
    history = trainer.fit(2, callbacks=[callback], validate_every_n_steps=4)
    assert callback.steps == [4, 8, 12, 16]
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)


def test_what_was_trained_between_two_runs_is_not_counted_to_the_epoch_that_was_left(make_local: Make) -> None:
    trainer = started(make_local)
    trainer.fit(max_steps=4)
    trainer.train(num_steps=2)
    history = trainer.fit(1)
    assert history["batch_count"] == [4]


@pytest.mark.parametrize(("epochs", "max_steps", "num_steps"), [(1, 25, 10), (3, 25, 25), (None, 25, 25), (3, 0, 0)])
def test_epochs_and_steps_are_limits_of_which_the_first_ends_the_run(
    epochs: int | None, max_steps: int, num_steps: int, make_local: Make
) -> None:
    trainer, notes = started(make_local), Notes()
    rows = list(trainer.epochs(epochs, max_steps=max_steps, callbacks=[notes]))
    assert trainer.get_local_operator().global_step == num_steps
    assert [row["epoch"] for row in rows] == list(range(1, num_steps // 10 + 1))
    assert notes.calls.count(("leave", 2, 5)) == (num_steps == 25)


def test_windows_of_accumulation_are_not_cut_by_the_last_step(make_local: Make) -> None:
    class Accumulates(Op):
        def accumulate_grad_batches(self, epoch_idx: int) -> int:
            return 4

    trainer = started(make_local, Accumulates)
    trainer.fit(max_steps=5)
    assert trainer.get_local_operator().global_step == 8


# ------------------------------------------------------------------------------------------------------ refused


class OwnEpoch(Op):
    def train_epoch(self, iterator: Any, info: Any = None, **kwargs: Any) -> Any:
        return super().train_epoch(iterator, info)


class NoValidation(Op):
    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        super().register_data(train_loader=train_loader)


@pytest.mark.parametrize("options", [{"max_steps": 5}, {"epochs": 1, "validate_every_n_steps": 5}], ids=str)
def test_what_cannot_be_held_is_refused_before_the_run(options: dict[str, Any], make_local: Make) -> None:
    name = [*options][-1]
    with pytest.raises(ValueError, match=rf"`{name}` cannot work here: `OwnEpoch` overrides `train_epoch`.*loop over"):
        started(make_local, OwnEpoch).fit(**options)
    with pytest.raises(ValueError, match=f"`{name}` cannot work here: a file does not hold the place in the `dataset`"):
        started(make_local).fit(**options, dataset=dataset(8))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, InvalidCountError, "Without `epochs`, pass `max_steps`"),
        ({"max_steps": -1}, InvalidCountError, "`max_steps=-1`: need"),
        ({"max_steps": 2.5}, InvalidCountError, "`max_steps=2.5`: need"),
        ({"epochs": 1, "validate_every_n_steps": 0}, InvalidCountError, "`validate_every_n_steps=0`: need"),
        ({"epochs": 1, "validate_every_n_steps": 5, "validate": "async"}, ValueError, "Leave one of them out"),
        ({"epochs": 1, "validate_every_n_steps": 5}, ValueError, "there is nothing to validate on"),
    ],
)
def test_what_has_no_meaning_is_refused(
    options: dict[str, Any], error: type[Exception], match: str, make_local: Make
) -> None:
    with pytest.raises(error, match=match):
        started(make_local, NoValidation).fit(**options)


class Acts(Notes):
    """Saves, and calls the trainer, in the middle of an epoch."""

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        super().on_validation(run, step, metrics)
        run.save(run.folder / f"own_{step}.pt")
        assert run.trainer.apply_all_operators(lambda operator: operator.global_step) == [step]  # type: ignore[union-attr]


def test_callbacks_may_save_and_call_the_trainer_where_the_workers_wait(make_local: Make, tmp_path: Path) -> None:
    whole = started(make_local)
    wanted = whole.fit(2)
    trainer, acts = started(make_local), Acts()
    trainer.fit(1, callbacks=[acts], validate_every_n_steps=4, folder=tmp_path)
    assert acts.steps == [4, 8]
    history = started(make_local).fit(2, resume_from=tmp_path / "own_8.pt")
    assert without_times(history) == without_times(wanted)


# ------------------------------------------------------------------------------------- saves behind the training


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let files of the background wait until the event is set."""
    may_write, saving = threading.Event(), files.saving

    @contextmanager
    def waiting(target: Any) -> Iterator[Any]:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(60)
        with saving(target) as file:
            yield file

    monkeypatch.setattr(files, "saving", waiting)
    yield may_write
    may_write.set()


class Looks(Callback):
    """Looks into the folder while the training goes on, and lets the write in flight end."""

    def __init__(self, saving: Checkpointing, folder: Path, may_write: threading.Event) -> None:
        self.saving, self.folder, self.may_write = saving, folder, may_write
        self.seen: list[list[str]] = []

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        if step == 5:  # the file of step 4 is being written
            self.seen.append(sorted(path.name for path in self.folder.glob("*.ckpt")))
            assert self.saving.newest is None
            index = json.loads((self.folder / INDEX_FILE).read_text())["saved"]
            assert [each["name"] for each in index] == ["epoch_0000_step_000004.ckpt"]
            self.may_write.set()

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        assert Path(checkpoint).is_file()
        self.seen.append(sorted(path.name for path in self.folder.glob("*.ckpt")))


def test_training_goes_on_while_a_file_is_written_and_nothing_is_deleted_before_the_next_is_there(
    make_local: Make, tmp_path: Path, slow: threading.Event
) -> None:
    saving = Checkpointing(tmp_path, every_n_steps=4, blocking=False)
    looks = Looks(saving, tmp_path, slow)
    started(make_local).fit(max_steps=13, callbacks=[saving, looks], validate_every_n_steps=5)
    first, second, third, fourth = (
        f"epoch_000{name}.ckpt" for name in ("0_step_000004", "0_step_000008", "1", "1_step_000002")
    )
    assert looks.seen[0] == []
    assert looks.seen[1:5] == [[first], [first, second], [second, third], [third, fourth]]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch_0001_step_000003.ckpt"]
    assert saving.newest == str(tmp_path / "epoch_0001_step_000003.ckpt")


def test_the_files_are_those_of_a_save_that_is_waited_for(make_local: Make, tmp_path: Path) -> None:
    for blocking in (True, False):
        trainer, notes = started(make_local), Notes()
        options: dict[str, Any] = {"keep_last": None, "metric": "val_loss", "every_n_steps": 4, "blocking": blocking}
        trainer.fit(2, callbacks=[Checkpointing(tmp_path / str(blocking), **options), notes], validate_every_n_steps=4)
    names = sorted(path.name for path in (tmp_path / "True").glob("*.ckpt"))
    assert sorted(path.name for path in (tmp_path / "False").glob("*.ckpt")) == names
    saved = [json.loads((tmp_path / name / INDEX_FILE).read_text()) for name in ("True", "False")]
    assert saved[0] == saved[1]
    for name in names:
        states = [torch.load(tmp_path / folder / name) for folder in ("True", "False")]
        assert equal(states[0]["models"], states[1]["models"])
        assert states[0]["optimizers"][0]["state"][0]["step"] == states[1]["optimizers"][0]["state"][0]["step"]
    trainer = started(make_local)
    history = trainer.fit(
        2, callbacks=[Checkpointing(tmp_path / "False", metric="val_loss")], resume_from=tmp_path / "False" / names[0]
    )
    assert [row["num_samples"] for row in history] == [40, 40]


def test_a_write_in_the_background_that_fails_is_counted_and_the_files_before_it_stay(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, saving = started(make_local), Checkpointing(tmp_path, every_n_steps=4, blocking=False, max_failures=None)
    trainer.fit(1, callbacks=[saving])
    with fail_save(trainer):
        trainer.fit(1, callbacks=[saving])
    assert saving.newest == str(tmp_path / "epoch_0001.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        INDEX_FILE,
        "epoch_0001.ckpt",
        "epoch_0001.ckpt.run.json",
    ]
    assert "could not save epoch 1, step 2 in" in caplog.text
    trainer.fit(1, callbacks=[saving])
    assert saving.newest == str(tmp_path / "epoch_0003.ckpt")
    saving = Checkpointing(tmp_path, every_n_steps=2, blocking=False, max_failures=2)
    with fail_save(trainer), pytest.raises(CallbackError, match="No space left"):
        trainer.fit(1, callbacks=[saving])
    trainer.fit(1)


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from raysgd.callbacks import Callback, Checkpointing, CSVLogger
from raysgd.storage import files
from raysgd.torch import TorchTrainer
from tests.callbacks.test_inside_epochs import CONFIG, Op

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
saving = files.saving

def slowly(target):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.1)  # most files are being written when the program is killed
    return saving(target)

files.saving = slowly

class Dies(Op):
    def train_batch(self, batch, batch_info):
        if self.global_step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return super().train_batch(batch, batch_info)

callbacks = [Checkpointing(folder / "files", every_n_steps=3, blocking=False), CSVLogger(folder / "metrics.csv")]
with TorchTrainer(
    training_operator_cls=Dies, config=CONFIG, scheduler_step_freq="batch", seed=5, use_local=True
) as trainer:
    trainer.fit(3, callbacks=callbacks, validate_every_n_steps=4, resume_from="auto", log_every_n_steps=3)
    torch.save(trainer.state_dict()["models"], folder / "models.pt")
"""


@pytest.mark.program
def test_a_killed_program_goes_on_from_the_newest_complete_file(tmp_path: Path) -> None:
    def run(folder: Path, dies_at: int = -1) -> int:
        folder.mkdir(exist_ok=True)
        return subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(dies_at)], cwd=ROOT).returncode

    assert run(tmp_path / "whole") == 0
    for dies_at in (8, 24):
        assert run(tmp_path / "killed", dies_at) == -signal.SIGKILL
    assert run(tmp_path / "killed") == 0
    models = [torch.load(tmp_path / name / "models.pt") for name in ("whole", "killed")]
    assert equal(models[0], models[1])
    for name in ("metrics.csv", "metrics.steps.csv"):
        rows = []
        for folder in ("whole", "killed"):
            lines = [line.split(",") for line in (tmp_path / folder / name).read_text().splitlines()]
            kept = [index for index, column in enumerate(lines[0]) if "seconds" not in column]
            rows.append([[line[index] for index in kept] for line in lines])
        assert rows[0] == rows[1]
    assert [path.name for path in (tmp_path / "killed" / "files").glob("*.ckpt")] == ["epoch_0003.ckpt"]


def test_what_is_no_yes_or_no_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(ValueError, match="blocking"):
        Checkpointing("files", blocking="no")  # type: ignore[arg-type]
