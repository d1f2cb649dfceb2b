"""`fit` that is left by a signal or by its time, and goes on exactly there: one worker, in this process.

Covers `raysgd.trainer.driver.fit_loop` and `fit_epoch`; that all ranks stop at one step is shown in
`tests/torch/test_leaving_integration.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raysgd
from raysgd.callbacks import Callback, Checkpointing, CSVLogger, EarlyStopping, GradientNorms, Run, WorkerCallback
from raysgd.core.history.history import History
from raysgd.exceptions import CallbackError
from raysgd.storage import owner
from raysgd.torch import TorchTrainer
from raysgd.trainer.driver.leaving import answer_signal
from raysgd.trainer.worker import step_loop
from tests.storage.test_owner import another_program
from tests.torch.operators_for_tests import DropoutOperator, ScheduledOperator, dataset, equal

Make = Callable[..., TorchTrainer]
CONFIG = {"num_samples": 40, "shuffle": True, "optimizer": "adam"}  # 10 batches an epoch
NUM_EPOCHS = 4


class Told(ScheduledOperator, DropoutOperator):
    """Draws random numbers, has a scheduler, and sends this process a signal in some of its batches."""

    at: frozenset[int] = frozenset()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        if self.global_step in type(self).at:
            signal.raise_signal(signal.SIGTERM)
        return super().train_batch(batch, batch_info)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Say in which batches signals come; the driver looks after each batch."""
    monkeypatch.setattr(step_loop, "_REDRAW_EVERY_S", 0.0)

    def tell(*batches: int) -> None:
        monkeypatch.setattr(Told, "at", frozenset(batches))

    before = signal.getsignal(signal.SIGTERM)  # Ray's, if it was started in this process
    yield tell
    assert signal.getsignal(signal.SIGTERM) == before, "the handlers are put back"


def started(make: Make, operator_cls: type[Told] = Told, **config: Any) -> TorchTrainer:
    return make(operator_cls, config={**CONFIG, **config}, scheduler_step_freq="batch")


def fit(make: Make, folder: Path, *callbacks: Callback, epochs: int = NUM_EPOCHS, **options: Any) -> Any:
    """Run one program of many: make a trainer and `fit` until all epochs are done, or it is left."""
    trainer = started(make)
    saving: list[Any] = [
        Checkpointing(folder / "files", metric="val_loss"),
        CSVLogger(folder / "metrics.csv"),
        GradientNorms(),
    ]
    given = {"resume_from": "auto", "log_every_n_steps": 3, "folder": folder, **options}
    history = trainer.fit(epochs, callbacks=[*saving, *callbacks], **given)
    return trainer, history


def until_done(make: Make, folder: Path, **options: Any) -> tuple[TorchTrainer, History, int]:
    """Do so again and again; return how often the program was left, too."""
    left: list[raysgd.Preempted] = []
    while len(left) < 100:
        try:
            found = fit(make, folder, **options)
        except raysgd.Preempted as error:
            left.append(error)
        else:
            assert {each.code for each in left} <= {143}
            return *found, len(left)
    raise AssertionError("it makes no progress")


def without_times(rows: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def written(folder: Path) -> list[Any]:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    kept = [index for index, name in enumerate(lines[0]) if "seconds" not in name]
    return [[line[index] for index in kept] for line in lines]


@pytest.mark.parametrize(
    "batches",
    [(0,), (4,), (8, 9, 10), (9, 19, 29), (3, 5, 17, 18, 36), tuple(range(0, 40, 2))],
    ids=lambda batches: f"at {batches[:3]}",
)
@pytest.mark.parametrize("options", [{}, {"validate_every_n_steps": 3}], ids=["", "validated"])
def test_it_is_to_the_last_bit_the_run_that_was_not_left(
    options: dict[str, Any],
    batches: tuple[int, ...],
    make_local: Make,
    told: Callable[..., None],
    tmp_path: Path,
) -> None:
    whole, wanted = fit(make_local, tmp_path / "whole", **options)
    told(*batches)
    trainer, history, num_left = until_done(make_local, tmp_path / "left", **options)
    assert num_left >= len(batches) / 4, "one that follows within two batches is the same"
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)
    assert written(tmp_path / "left") == written(tmp_path / "whole")
    steps = [(tmp_path / name / "metrics.steps.csv").read_text() for name in ("left", "whole")]
    assert steps[0] == steps[1]
    validations = [[each.step for each in run.records if each.step] for run in (history, wanted)]
    assert validations[0] == validations[1] == [step for step in range(3, 40, 3) if options and step % 10]
    assert [each.name for each in (tmp_path / "left" / "files").glob("*.ckpt")].count("epoch_0004.ckpt") == 1


def test_the_row_of_an_epoch_that_was_left_has_the_time_of_all_its_parts(
    make_local: Make, told: Callable[..., None], tmp_path: Path
) -> None:
    told(4)
    _, history, _ = until_done(make_local, tmp_path, epochs=1)
    beside = json.loads((tmp_path / "files" / "epoch_0001.ckpt.run.json").read_text())
    trained = next(each for each in beside["history"]["records"] if each["kind"] == "train")
    assert history[0]["seconds"] > trained["seconds"], "that is the time of the last part"


def test_files_from_inside_an_epoch_have_its_step_and_give_way_to_the_next(
    make_local: Make, told: Callable[..., None], tmp_path: Path
) -> None:
    told(14)
    with pytest.raises(raysgd.Preempted) as raised:
        fit(make_local, tmp_path)
    assert raised.value.checkpoint is not None
    name = Path(raised.value.checkpoint).name
    assert name.startswith("epoch_0001_step_0000")
    saved = json.loads((tmp_path / "files" / "checkpoints.json").read_text())["saved"]
    assert [each["name"] for each in saved] == ["epoch_0001.ckpt", name], "the best one, and the newest"
    told()
    fit(make_local, tmp_path)
    assert not (tmp_path / "files" / name).exists()


class Notes(Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_run_begin(self, run: Run) -> None:
        self.calls.append(("begin", run.epoch, run.step))

    def on_leave(self, run: Run) -> None:
        self.calls.append(("leave", run.epoch, run.step))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.calls.append(("end", type(error).__name__, run.history.stop_reason))


def test_callbacks_are_told_where_a_run_is_left_and_where_it_goes_on(
    make_local: Make, told: Callable[..., None], tmp_path: Path
) -> None:
    told(14)
    notes = Notes()
    with pytest.raises(raysgd.Preempted):
        fit(make_local, tmp_path, notes)
    step = notes.calls[1][2]
    assert 5 <= step <= 7
    assert notes.calls == [("begin", 0, 0), ("leave", 1, step), ("end", "Preempted", None)]
    told()
    again = Notes()
    fit(make_local, tmp_path, again)
    assert again.calls == [("begin", 1, step), ("end", "NoneType", None)]


class LateCallback(Notes):
    """Is told by the signal in the result of an epoch."""

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        if run.epoch == 2:
            signal.raise_signal(signal.SIGTERM)


class EarlyCallback(Callback):
    """Gets a signal while the run begins."""

    def on_run_begin(self, run: Run) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("every_n_epochs", [1, 3])
def test_a_signal_between_two_epochs_saves_the_last_one_once(
    every_n_epochs: int, make_local: Make, tmp_path: Path
) -> None:
    trainer, notes = started(make_local), LateCallback()
    saving = Checkpointing(tmp_path, every_n_epochs=every_n_epochs)
    with pytest.raises(raysgd.Preempted) as raised:
        trainer.fit(NUM_EPOCHS, callbacks=[notes, saving])
    assert raised.value.checkpoint == saving.newest == str(tmp_path / "epoch_0002.ckpt")
    assert notes.calls[1:] == [("leave", 2, 0), ("end", "Preempted", None)]


def test_a_run_that_is_left_before_its_first_step_is_resumed_as_any_other(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(raysgd.Preempted) as raised:
        fit(make_local, tmp_path, EarlyCallback())
    assert raised.value.checkpoint == str(tmp_path / "files" / "epoch_0000.ckpt")
    fit(make_local, tmp_path)
    assert "of another run" not in caplog.text
    assert "epoch_0000.ckpt" not in {path.name for path in (tmp_path / "files").iterdir()}


def test_a_signal_in_the_body_of_a_loop_is_answered_by_the_next_epoch(make_local: Make, tmp_path: Path) -> None:
    trainer = started(make_local)
    epochs = trainer.epochs(NUM_EPOCHS, callbacks=[Checkpointing(tmp_path)])
    assert [next(epochs)["epoch"], next(epochs)["epoch"]] == [1, 2]
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(raysgd.Preempted) as raised:
        next(epochs)
    assert (raised.value.code, raised.value.signal) == (138, signal.SIGUSR1)
    assert raised.value.checkpoint == str(tmp_path / "epoch_0002.ckpt")


def test_without_a_callback_that_saves_the_trainer_has_the_state_of_the_step(
    make_local: Make, told: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told(4)
    trainer = started(make_local)
    with pytest.raises(raysgd.Preempted) as raised:
        trainer.fit(1)
    assert raised.value.checkpoint is None
    assert "SIGTERM: left the run after 0 epochs and" in caplog.text
    assert "nothing is saved" in caplog.text
    num_before = trainer.get_local_operator().global_step
    trainer.save(tmp_path / "left.pt")
    other = started(make_local)
    other.load(tmp_path / "left.pt")
    assert other.train()["num_samples"] == 40 - 4 * num_before


def test_a_save_that_fails_is_said_and_the_last_file_stands(
    make_local: Make, told: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(14)
    trainer, saving = started(make_local), Checkpointing(tmp_path)
    save = trainer.save

    def full(checkpoint: Any) -> Any:
        if "step" in str(checkpoint):
            raise OSError("disk full")
        return save(checkpoint)

    monkeypatch.setattr(trainer, "save", full)
    with pytest.raises(raysgd.Preempted) as raised:
        trainer.fit(NUM_EPOCHS, callbacks=[saving])
    assert raised.value.checkpoint == saving.newest == str(tmp_path / "epoch_0001.ckpt")


def test_time_that_is_over_ends_the_run_well_and_it_goes_on_later(make_local: Make, tmp_path: Path) -> None:
    whole, wanted = fit(make_local, tmp_path / "whole")
    notes = Notes()
    _, history = fit(make_local, tmp_path / "left", notes, max_time=0.001)
    assert len(history) == 0, "not one batch, because half of that is kept back"
    assert history.stop_reason == "`max_time` of 0.001 s"
    assert [call[0] for call in notes.calls] == ["begin", "leave", "end"]
    assert notes.calls[-1] == ("end", "NoneType", "`max_time` of 0.001 s")
    trainer, history = fit(make_local, tmp_path / "left", max_time="01:00:00")
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)
    assert history.stop_reason is None


def test_a_run_that_is_done_is_not_left_for_its_time(make_local: Make, tmp_path: Path) -> None:
    _, history = fit(make_local, tmp_path, epochs=1)
    _, again = fit(make_local, tmp_path, epochs=1, max_time=1e-9)
    assert history.stop_reason is again.stop_reason is None


class Accumulates(Told):
    def accumulate_grad_batches(self, epoch_idx: int) -> int:
        return 4


def test_windows_of_accumulation_are_not_cut(make_local: Make, told: Callable[..., None], tmp_path: Path) -> None:
    def run(folder: Path) -> tuple[TorchTrainer, Any]:
        trainer = started(make_local, Accumulates, num_samples=56)  # 14 batches: 4, 4, 4, 2
        return trainer, trainer.fit(2, callbacks=[Checkpointing(folder)], resume_from="auto")

    whole, wanted = run(tmp_path / "whole")
    told(5)
    with pytest.raises(raysgd.Preempted) as raised:
        run(tmp_path / "left")
    assert Path(raised.value.checkpoint or "").name == "epoch_0000_step_000008.ckpt"
    told()
    trainer, history = run(tmp_path / "left")
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)


class OwnEpoch(Told):
    def train_epoch(self, iterator: Any, info: Any = None, **kwargs: Any) -> Any:
        return super().train_epoch(iterator, info)


def test_an_epoch_that_cannot_be_held_ends_before_the_answer(
    make_local: Make, told: Callable[..., None], tmp_path: Path
) -> None:
    told(14)
    trainer = started(make_local, OwnEpoch)
    with pytest.raises(raysgd.Preempted) as raised:
        trainer.fit(NUM_EPOCHS, callbacks=[Checkpointing(tmp_path)])
    assert raised.value.checkpoint == str(tmp_path / "epoch_0002.ckpt")


def test_early_stopping_has_its_counts_again(make_local: Make, told: Callable[..., None], tmp_path: Path) -> None:
    def run(folder: Path) -> History:
        stopping = EarlyStopping("val_loss", patience=2, min_delta=100.0)
        return fit(make_local, folder, stopping, epochs=20)[1]

    wanted = run(tmp_path / "whole")
    for at in (3, 13, 23):
        told(at)
        with pytest.raises(raysgd.Preempted):
            run(tmp_path / "left")
    told()
    history = run(tmp_path / "left")
    assert len(history) == len(wanted) < 20
    assert history.stop_reason == wanted.stop_reason


PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "stop-and-resume.md"


def test_the_loop_over_train_on_the_page_goes_on_where_a_signal_has_left_it(
    make_local: Make, told: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [lines] = [each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "told = []" in each]
    before = signal.getsignal(signal.SIGTERM)

    def make(**options: Any) -> TorchTrainer:
        return TorchTrainer(**{**options, "config": CONFIG}, scheduler_step_freq="batch")

    def run(folder: Path) -> tuple[Any, int]:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        status = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(lines, {"TorchTrainer": make, "Digits": Told, "os": os, "signal": signal})
            except SystemExit as ended:
                status = int(str(ended.code))
            finally:
                signal.signal(signal.SIGTERM, before)
        trainer = started(make_local)
        trainer.load("newest.pt")
        return trainer.state_dict(), status

    whole, status = run(tmp_path / "whole")
    assert status == 0
    told(3)
    _, first_status = run(tmp_path / "left")
    found, status = run(tmp_path / "left")
    assert (first_status, status) == (143, 0)
    assert equal(found, whole)


def test_damage_beside_a_file_is_named(make_local: Make, told: Callable[..., None], tmp_path: Path) -> None:
    told(4)
    with pytest.raises(raysgd.Preempted) as raised:
        fit(make_local, tmp_path)
    beside = Path(f"{raised.value.checkpoint}.run.json")
    content = json.loads(beside.read_text())
    del content["begun"]["by_rank"]
    beside.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="The progress of an epoch beside the checkpoint is damaged"):
        fit(make_local, tmp_path)


def test_the_data_may_have_changed_and_the_epoch_begins_again(
    make_local: Make, told: Callable[..., None], tmp_path: Path
) -> None:
    told(4)
    with pytest.raises(raysgd.Preempted):
        fit(make_local, tmp_path)
    told()
    trainer = started(make_local, num_samples=44)
    history = trainer.fit(1, callbacks=[Checkpointing(tmp_path / "files", metric="val_loss")], resume_from="auto")
    assert history[-1]["num_samples"] == 44
    assert math.isfinite(history[-1]["train_loss"])
    assert torch.isfinite(trainer.get_model()[0].weight).all()
    assert CallbackError.__name__ not in str(history)


# ------------------------------------------------------------------------------------------- saves inside epochs


class SavesNames(Callback):
    """Notes what is saved, in the order of time."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.names.append(Path(checkpoint).name)


class Epochs(WorkerCallback):
    """Counts what it is told in the worker."""

    def on_begin(self, operator: Any) -> None:
        self.num_begun = self.num_steps = 0

    def on_epoch_begin(self, operator: Any) -> None:
        self.num_begun += 1

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        self.num_steps += 1

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        metrics["num_begun"], metrics["num_steps"] = self.num_begun, self.num_steps


def test_saves_every_few_steps_change_no_bit_and_no_row(make_local: Make, tmp_path: Path) -> None:
    def run(folder: Path, **options: Any) -> tuple[TorchTrainer, History, list[str]]:
        trainer, names = started(make_local), SavesNames()
        saving = Checkpointing(folder / "files", keep_last=None, **options)
        logger = CSVLogger(folder / "metrics.csv")
        return trainer, trainer.fit(3, callbacks=[names, saving, logger, Epochs()], log_every_n_steps=3), names.names

    whole, wanted, _ = run(tmp_path / "whole")
    trainer, history, names = run(tmp_path / "saved", every_n_steps=4)
    assert names == [
        "epoch_0000_step_000004.ckpt",
        "epoch_0000_step_000008.ckpt",
        "epoch_0001.ckpt",
        "epoch_0001_step_000002.ckpt",  # the twelfth of all
        "epoch_0001_step_000006.ckpt",
        "epoch_0001_step_000010.ckpt",
        "epoch_0002.ckpt",
        "epoch_0002_step_000004.ckpt",
        "epoch_0002_step_000008.ckpt",
        "epoch_0003.ckpt",
    ]
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)
    assert history["num_begun"] == [1, 2, 3]
    assert history["num_steps"] == [10, 20, 30]
    assert written(tmp_path / "saved") == written(tmp_path / "whole")


class Dies(Told):
    """Ends its program by an error in some batch, so that only files are left."""

    dies_at = -1

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        if self.global_step == type(self).dies_at:
            raise OSError("the machine is gone")
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("dies_at", [6, 9, 10, 15, 29])
def test_a_run_that_dies_goes_on_from_its_last_file_to_the_last_bit(
    dies_at: int, make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> tuple[TorchTrainer, History]:
        trainer = started(make_local, Dies)
        callbacks = [Checkpointing(folder / "files", every_n_steps=4), CSVLogger(folder / "metrics.csv")]
        return trainer, trainer.fit(3, callbacks=callbacks, resume_from="auto", log_every_n_steps=3)

    whole, wanted = run(tmp_path / "whole")
    monkeypatch.setattr(Dies, "dies_at", dies_at)
    with pytest.raises(OSError, match="the machine is gone"):
        run(tmp_path / "left")
    monkeypatch.setattr(Dies, "dies_at", -1)
    trainer, history = run(tmp_path / "left")
    assert equal(trainer.state_dict(), whole.state_dict())
    assert without_times(history) == without_times(wanted)
    assert written(tmp_path / "left") == written(tmp_path / "whole")
    steps = [(tmp_path / name / "metrics.steps.csv").read_text() for name in ("left", "whole")]
    assert steps[0] == steps[1]


def test_saves_by_the_clock_are_as_far_apart_as_asked(make_local: Make, tmp_path: Path) -> None:
    trainer, names = started(make_local), SavesNames()
    trainer.fit(2, callbacks=[names, Checkpointing(tmp_path, every_minutes=1e-9, keep_last=3)])
    assert sum("_step_" in name for name in names.names) >= 4
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    trainer, names = started(make_local), SavesNames()
    trainer.fit(2, callbacks=[names, Checkpointing(tmp_path / "rarely", every_minutes=60)])
    assert names.names == ["epoch_0001.ckpt", "epoch_0002.ckpt"]


def test_steps_of_several_batches_are_saved_whole(make_local: Make, tmp_path: Path) -> None:
    trainer, names = started(make_local, Accumulates, num_samples=56), SavesNames()
    trainer.fit(1, callbacks=[names, Checkpointing(tmp_path, every_n_steps=5)])
    assert names.names == ["epoch_0000_step_000008.ckpt", "epoch_0000_step_000012.ckpt", "epoch_0001.ckpt"]


@pytest.mark.parametrize("options", [{"every_n_steps": 2}, {"every_minutes": 1.0}], ids=str)
def test_what_cannot_be_held_is_refused_before_the_run(
    options: dict[str, Any], make_local: Make, tmp_path: Path
) -> None:
    saving = Checkpointing(tmp_path, **options)
    with pytest.raises(ValueError, match=r"`OwnEpoch` overrides `train_epoch`.* Leave them out, or loop over"):
        started(make_local, OwnEpoch).fit(1, callbacks=[saving])
    with pytest.raises(ValueError, match="does not hold the place in the `dataset` of a call"):
        started(make_local).fit(1, callbacks=[saving], dataset=dataset(8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"every_n_steps": 1.5}, {"every_minutes": 0}], ids=str)
def test_what_is_no_count_and_no_time_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every_"):
        Checkpointing("files", **options)


class Signals(Callback):
    """Sends a signal in one of its methods, in the second epoch or later."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name != super().__getattribute__("hook"):
            return method

        def call(run: Run, *args: Any) -> Any:
            if run.epoch >= 2:
                signal.raise_signal(signal.SIGTERM)
            return method(run, *args)

        return call


HOOKS = ["on_epoch_begin", "on_progress", "on_epoch_trained", "on_checkpoint", "on_result", "on_leave", "on_run_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_signal_in_a_callback_ends_the_program_and_nothing_is_lost(
    hook: str, make_local: Make, tmp_path: Path
) -> None:
    callback = type("InHook", (Signals,), {hook: lambda self, run, *args: None})(hook)
    limit = {"max_steps": 25} if hook == "on_leave" else {}  # it is called where a run stops early
    with pytest.raises(raysgd.Preempted) as raised:
        fit(make_local, tmp_path, callback, epochs=3, **limit)
    assert raised.value.code == 143
    assert raised.value.checkpoint is not None
    _, history = fit(make_local, tmp_path, epochs=3, **limit)
    assert [row["epoch"] for row in history] == list(range(1, 3 if limit else 4))


@pytest.mark.parametrize("leaves", [lambda rows: None, lambda rows: rows.close()], ids=["break", "close"])
def test_a_signal_in_a_loop_that_the_program_leaves_ends_it(
    leaves: Callable[[Any], None], make_local: Make, tmp_path: Path
) -> None:
    called: list[int] = []
    trainer, saving = started(make_local), Checkpointing(tmp_path, every_n_epochs=3)
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        with pytest.raises(raysgd.Preempted) as raised:  # noqa: PT012 - the signal ends what comes behind the loop
            rows = trainer.epochs(9, callbacks=[saving], resume_from="auto")
            for row in rows:
                if row["epoch"] == 2:
                    signal.raise_signal(signal.SIGTERM)
                    break
            leaves(rows)
            del rows
            answer_signal()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM]
    assert raised.value.checkpoint == str(tmp_path / "epoch_0002.ckpt")


def test_a_checkpoint_whose_file_beside_is_gone_is_resumed_and_it_is_said_what_is_missing(
    make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(make_local, tmp_path, epochs=2)
    beside = tmp_path / "files" / "epoch_0002.ckpt.run.json"
    beside.unlink()
    _, history = fit(make_local, tmp_path, epochs=3)
    assert [row["epoch"] for row in history] == [3]
    assert f"has no `{beside}` beside it" in caplog.text
    assert "of another run" not in caplog.text, "it advises what was passed"


def test_a_second_program_in_a_folder_is_refused_before_it_reads_or_writes(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_DYING_S", 0.2)
    for place in (tmp_path, tmp_path / "files"):
        with another_program(place):
            with pytest.raises(ValueError, match="Another program writes to"):
                fit(make_local, tmp_path, epochs=1)
            assert not list(tmp_path.rglob("*.ckpt"))
    fit(make_local, tmp_path, epochs=1)
    assert not list(tmp_path.rglob(owner.FILE))


def test_a_signal_ends_the_wait_for_another_program(
    make_local: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def holder(folder: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setattr(owner, "_holder_of", holder)
    with another_program(tmp_path), pytest.raises(raysgd.Preempted):
        fit(make_local, tmp_path, epochs=1)
