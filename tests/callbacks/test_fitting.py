"""`fit`, `test` and `history` of a trainer with one worker in this process.

Covers `raysgd.trainer.driver.fit_loop` and `raysgd.trainer.driver.trainer`; `raysgd.core.history.history` only passes
on.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd.callbacks import (
    Callback,
    Checkpointing,
    EarlyStopping,
    GradientNorms,
    HTMLReport,
    JSONLogger,
    ProgressBar,
    Run,
)
from raysgd.core.engine.shared.interface import CallHandle
from raysgd.core.history import history as history_module
from raysgd.core.numbers.results import CallProgress, name_in_test
from raysgd.exceptions import CallbackError, InvalidCountError, NotRegisteredError, WorkersLostError
from raysgd.torch import TorchTrainer
from raysgd.trainer.driver.calls import TrainerCalls
from tests.torch.operators_for_tests import LinearOperator, dataset

Make = Callable[..., TorchTrainer]


class Terminal(io.StringIO):
    """One that can draw over a line."""

    def isatty(self) -> bool:
        return True


class NoValidation(LinearOperator):
    """Registers nothing to validate on."""

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        super().register_data(train_loader=train_loader)


class NeedsNoData(NoValidation):
    """Validates on what it has."""

    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        return {"val_distance": 3.0}


class NeedsData(NoValidation):
    """Adds to the stock `validate`."""

    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        return {**super().validate(val_iterator, info), "val_distance": 3.0}


class FailsToValidate(NoValidation):
    """Has a mistake in its `validate`."""

    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        raise NotRegisteredError("a mistake")


class Counts(Callback):
    """Notes what is called when, and has a state."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.num_results = 0

    def on_run_begin(self, run: Run) -> None:
        self.calls.append(("begin", run.epoch, len(run.history)))

    def on_epoch_begin(self, run: Run) -> None:
        self.calls.append(("epoch", run.epoch))

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.num_results += 1
        result["double"] = 2 * result["train_loss"]
        self.calls.append(("result", run.epoch, run.epochs))

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.calls.append(("checkpoint", Path(checkpoint).name))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.calls.append(("end", error))

    def state_dict(self) -> Any:
        return self.num_results

    def load_state_dict(self, state: Any) -> None:
        self.num_results = state


class SavesTo(Callback):
    """Saves after each epoch; knows where."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        run.save(self.location)

    def newest_checkpoint(self, run: Run) -> str | None:
        return str(self.location) if self.location.exists() else None


class FailsIn(Callback):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        def fail(*args: Any) -> None:
            raise OSError("disk full")

        self.__class__ = type("FailsIn", (Callback,), {method: fail})


class Stops(Callback):
    """Stops after some epochs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        if run.epoch == self.after:
            run.stop("enough")


class LostValidation(CallHandle[Any]):
    """A validation whose spare was lost."""

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        raise WorkersLostError("no spare is left")


def test_an_epoch_whose_spare_was_lost_has_no_metrics_of_validation_and_the_run_goes_on(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trainer, saving = make_local(LinearOperator), Checkpointing(tmp_path, keep_last=None)
    monkeypatch.setattr(TrainerCalls, "validates_beside", True)
    monkeypatch.setattr(TrainerCalls, "begin_validation", lambda *args, **options: LostValidation())
    history = trainer.fit(2, validate="async", callbacks=[EarlyStopping("val_loss"), saving])
    assert [row.get("val_loss") for row in history] == [None, None]
    for epoch in (1, 2):
        assert f"epoch {epoch} has no metrics of validation: no spare is left" in caplog.text
        assert (tmp_path / f"epoch_000{epoch}.ckpt").exists()


def weights(trainer: TorchTrainer) -> torch.Tensor:
    weight: torch.Tensor = trainer.get_model().weight.detach().clone()
    return weight


class TestEpochs:
    def test_are_those_of_train_and_validate_by_hand(self, make_local: Make) -> None:
        by_hand, fitted = make_local(), make_local()
        results = [(by_hand.train(), by_hand.validate()) for _ in range(3)]
        history = fitted.fit(3)
        assert torch.equal(weights(by_hand), weights(fitted))
        assert history["train_loss"] == [train["train_loss"] for train, _ in results]
        assert history["val_loss"] == [validation["val_loss"] for _, validation in results]
        assert (history["epoch"], history["num_workers"]) == ([1, 2, 3], [1, 1, 1])

    def test_come_one_by_one_as_they_end(self, make_local: Make) -> None:
        looped, fitted, counts = make_local(), make_local(), Counts()
        rows = []
        for row in looped.epochs(3, callbacks=[counts], validation_freq=2):
            rows.append(row)
            assert (len(looped.history), counts.calls[-1][0]) == (len(rows), "result")
        assert counts.calls[-1] == ("end", None)
        expected = fitted.fit(3, callbacks=[Counts()], validation_freq=2)
        assert [row.keys() for row in rows] == [row.keys() for row in expected]
        assert [row["train_loss"] for row in rows] == expected["train_loss"]
        assert rows[0]["double"] == 2 * rows[0]["train_loss"]

    @pytest.mark.parametrize("how", ["break", "error"])
    def test_end_where_the_loop_is_left(self, how: str, make_local: Make, tmp_path: Path) -> None:
        trainer, counts, norms = make_local(), Counts(), GradientNorms()
        saving, log = Checkpointing(tmp_path / "saved", every_n_epochs=9), JSONLogger(tmp_path / "log.jsonl")
        reporting = HTMLReport(tmp_path / "report.html")
        with contextlib.suppress(LookupError):
            for row in trainer.epochs(9, callbacks=[counts, norms, saving, log, reporting]):
                if row["epoch"] == 2 and how == "error":
                    raise LookupError
                if row["epoch"] == 2:
                    break
        assert counts.calls[-2:] == [("end", None), ("checkpoint", "epoch_0002.ckpt")]
        assert saving.newest == str(tmp_path / "saved" / "epoch_0002.ckpt")
        assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
        assert "the program has left the loop over the epochs" in (tmp_path / "report.html").read_text()
        assert trainer.worker_callbacks == ()
        assert trainer.fit(1)["epoch"] == [3]

    def test_wait_until_the_first_one_is_wanted(self, make_local: Make) -> None:
        trainer = make_local()
        rows = trainer.epochs(2)
        assert len(trainer.history) == 0
        assert next(rows)["epoch"] == 1
        assert trainer.validate()["num_samples"] == 13, "calls in between are possible"
        assert [row["epoch"] for row in rows] == [2]

    def test_go_on_where_the_last_call_stopped(self, make_local: Make) -> None:
        trainer = make_local()
        counts = Counts()
        trainer.fit(1)
        history = trainer.fit(2, callbacks=[counts])
        assert history["epoch"] == [2, 3]
        assert counts.calls[:3] == [("begin", 1, 0), ("epoch", 1), ("result", 2, 3)]
        assert trainer.history["epoch"] == [1, 2, 3]

    @pytest.mark.parametrize(("freq", "validated"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
    def test_are_validated_as_often_as_requested(self, freq: int, validated: list[int], make_local: Make) -> None:
        history = make_local().fit(4, validation_freq=freq)
        assert [row["epoch"] for row in history if "val_loss" in row] == validated

    def test_are_not_validated_without_data_for_it(self, make_local: Make) -> None:
        [row] = make_local(NoValidation).fit(1)
        assert not [name for name in row if name.startswith("val_")]

    def test_are_validated_by_a_method_of_the_user_as_long_as_it_needs_no_data(
        self, make_local: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert make_local(NeedsNoData).fit(2)["val_distance"] == [3, 3]
        assert not caplog.records
        trainer = make_local(NeedsData)
        history = trainer.fit(2)
        assert (history["epoch"], "val_distance" in history[-1]) == ([1, 2], False)
        [warning] = [record.getMessage() for record in caplog.records]
        assert warning.startswith("`NeedsData.validate` needs data, so `fit` does not validate: `validation_loader`")
        data = DataLoader(dataset(7, seed=2), batch_size=4)
        assert trainer.fit(1, validation_dataset=data)["val_distance"] == [3]
        with pytest.raises(NotRegisteredError, match="a mistake"):
            make_local(FailsToValidate).fit(1)

    def test_show_how_many_there_will_be(self, make_local: Make) -> None:
        seen: list[CallProgress] = []

        class Watches(Callback):
            def on_progress(self, run: Run, progress: CallProgress) -> None:
                seen.append(progress)

        make_local().fit(2, callbacks=[Watches()])
        assert {each.kind for each in seen} == {"train", "validation"}
        assert {each.num_epochs for each in seen if each.kind == "train"} == {2}

    @pytest.fixture
    def in_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"epochs": -1}, InvalidCountError, "`epochs=-1`: need a number of epochs"),
            ({"epochs": "3"}, InvalidCountError, "`epochs='3'`"),
            ({"epochs": 1, "validation_freq": 0.5}, InvalidCountError, r"need 0 \(never\), 1 \(after each epoch\)"),
            ({"epochs": 1, "log_every_n_steps": -1}, InvalidCountError, "`log_every_n_steps=-1`: need a number"),
            ({"epochs": 1, "resume_from": 7}, TypeError, "`resume_from=7`: need a path"),
            ({"epochs": 1, "resume_from": ""}, ValueError, "`resume_from=''`: need a path"),
            ({"epochs": 1, "resume_from": "auto"}, ValueError, r"no callback finds checkpoints.*\[Checkpointing"),
            ({"epochs": 1, "folder": 7}, TypeError, "`folder=7`: need a path"),
            ({"epochs": 1, "folder": ""}, ValueError, "`folder=''`: need a path"),
            ({"epochs": 1, "folder": "s3://bucket/x"}, ValueError, r"not a URI\. Callbacks .*`Checkpointing"),
            ({"epochs": 1, "folder": "/proc/x"}, ValueError, "`folder='/proc/x'`: the folder cannot be made"),
            ({"epochs": 1, "folder": __file__}, ValueError, r"cannot be made \(File exists\)"),
            (
                {"epochs": 1, "validation_freq": 0, "callbacks": [Checkpointing("x", metric="val_loss")]},
                ValueError,
                r"`Checkpointing\(metric='val_loss'\)` with `validation_freq=0`",
            ),
            (
                {"epochs": 1, "callbacks": [Checkpointing("x"), Checkpointing("x")]},
                ValueError,
                r"two `Checkpointing` that write to .*x: pass another `folder`",
            ),
            (
                {"epochs": 1, "callbacks": [Checkpointing(), Checkpointing()]},
                ValueError,
                "two `Checkpointing` that write to the folder of the run",
            ),
            (
                {"epochs": 1, "callbacks": [JSONLogger("x"), JSONLogger("x")]},
                ValueError,
                r"two `JSONLogger` that write to .*x: pass another `path`",
            ),
            (
                {"epochs": 1, "callbacks": [HTMLReport(), HTMLReport()]},
                ValueError,
                "two `HTMLReport` that write to the folder of the run: pass another `path`",
            ),
            ({"epochs": 1, "dataset": "x"}, TypeError, "`dataset=` got `str`"),
            ({"epochs": 1, "validation_dataset": "x"}, TypeError, "`validation_dataset=` got `str`"),
            ({"epochs": 1, "callbacks": [7]}, TypeError, "`callbacks` has 7"),
        ],
    )
    def test_bad_arguments_train_nothing(
        self, options: Any, error: type[Exception], words: str, make_local: Make, in_empty_folder: Path
    ) -> None:
        trainer = make_local()
        with pytest.raises(error, match=words):
            trainer.fit(**options)
        with pytest.raises(error, match=words):
            trainer.epochs(**options)
        assert len(trainer.history) == 0
        assert not list(in_empty_folder.iterdir())


class TestCallbacks:
    def test_are_called_around_each_epoch_and_add_to_the_history(self, make_local: Make) -> None:
        trainer, counts = make_local(), Counts()
        history = trainer.fit(2, callbacks=[counts])
        epochs = [("epoch", 0), ("result", 1, 2), ("epoch", 1), ("result", 2, 2)]
        assert counts.calls == [("begin", 0, 0), *epochs, ("end", None)]
        assert history["double"] == [2 * loss for loss in history["train_loss"]] == trainer.history["double"]

    def test_stop_a_run_after_an_epoch(self, make_local: Make) -> None:
        history = make_local().fit(5, callbacks=[Stops(after=2)])
        assert (history["epoch"], history.stop_reason) == ([1, 2], "enough")
        assert "stopped: enough" in repr(history)

    @pytest.mark.parametrize("method", ["on_run_begin", "on_epoch_begin", "on_progress", "on_result", "on_run_end"])
    def test_that_fail_are_named_and_leave_the_trainer_usable(self, method: str, make_local: Make) -> None:
        trainer, counts = make_local(), Counts()
        with pytest.raises(CallbackError, match=f"`FailsIn` failed in `{method}`: OSError: disk full"):
            trainer.fit(1, callbacks=[counts, FailsIn(method)])
        end, error = counts.calls[-1]
        assert end == "end"
        assert isinstance(error, CallbackError) == (method != "on_run_end")
        assert len(trainer.fit(1)) == 1

    def test_of_a_run_that_is_interrupted_hear_of_it(self, make_local: Make) -> None:
        class PressesCtrlC(Callback):
            def on_result(self, run: Run, result: dict[str, Any]) -> None:
                raise KeyboardInterrupt

        trainer, counts = make_local(), Counts()
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(2, callbacks=[counts, PressesCtrlC()])
        assert isinstance(counts.calls[-1][1], KeyboardInterrupt)
        assert trainer.fit(1)["epoch"] == [2]


class Calls(Callback):
    """Calls a function with the run in one of the methods."""

    def __init__(self, method: str, function: Callable[[Run], object]) -> None:
        self.returned: list[Any] = []
        self.__class__ = type("Calls", (Callback,), {method: lambda _, run, *args: self.returned.append(function(run))})


def validated_on_others(trainer: TorchTrainer, **options: Any) -> float:
    loss: float = trainer.validate(dataset=DataLoader(dataset(7, seed=2), batch_size=4), **options)["val_loss"]
    return loss


class TestOtherCallsDuringARun:
    @pytest.mark.parametrize("method", ["on_run_begin", "on_epoch_begin", "on_epoch_trained", "on_result", "the loop"])
    @pytest.mark.parametrize("freq", [1, 2])
    def test_leave_each_row_the_validation_of_its_epoch(
        self, method: str, freq: int, make_local: Make, tmp_path: Path
    ) -> None:
        expected = make_local().fit(3, validation_freq=freq)
        others = Calls(method, lambda run: validated_on_others(run.trainer))  # type: ignore[arg-type]
        trainer, saving, log = make_local(), Checkpointing(tmp_path), JSONLogger(tmp_path / "log.jsonl")
        for _ in trainer.epochs(3, callbacks=[others, log, saving], validation_freq=freq):
            if method == "the loop":
                others.returned.append(validated_on_others(trainer))
        assert len(others.returned) in (1, 3)
        assert not set(others.returned) & set(expected["val_loss"])
        resumed = make_local().fit(3, resume_from=str(saving.newest))
        for history in (trainer.history, resumed):
            assert history["val_loss"] == expected["val_loss"]
            assert history["epoch"] == [1, 2, 3]
            num_known = 2 if history is resumed and method == "the loop" else 3  # the file was earlier
            of_others = [each for each in history.records if each.kind == "validation" and not each.of_fit]
            assert [each.metrics["val_loss"] for each in of_others] == others.returned[:num_known]
        logged = [json.loads(line).get("val_loss") for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert logged == expected["val_loss"]

    @pytest.mark.parametrize("method", ["on_epoch_begin", "on_result"])
    def test_on_some_batches_leave_the_validation_of_an_epoch_whole(self, method: str, make_local: Make) -> None:
        expected = make_local().fit(2)
        some = Calls(method, lambda run: run.trainer.validate(num_steps=1))  # type: ignore[union-attr]
        history = make_local().fit(2, callbacks=[some])
        assert [each["num_samples"] for each in some.returned] == [4, 4]
        assert history["val_num_samples"] == [13, 13]
        assert history["val_loss"] == expected["val_loss"]

    @pytest.mark.parametrize("name", ["train", "fit", "epochs"])
    @pytest.mark.parametrize("method", ["on_run_begin", "on_epoch_trained", "on_result"])
    def test_that_train_are_refused_in_callbacks(self, name: str, method: str, make_local: Make) -> None:
        trainer = make_local()
        calls = Calls(method, lambda run: getattr(run.trainer, name)(**({} if name == "train" else {"epochs": 1})))
        with pytest.raises(CallbackError, match=rf"in `{method}`: .*was called while `fit` runs.*in trainer\.epochs"):
            trainer.fit(2, callbacks=[calls])
        num_done = 0 if method == "on_run_begin" else 1
        assert (len(trainer.history), trainer.fit(1)["epoch"]) == (num_done, [num_done + 1])

    def test_that_change_the_number_of_the_epoch_are_named_in_the_log(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = make_local()
        trainer.fit(1)
        trainer.save(tmp_path / "first.pt")
        back = Calls("on_result", lambda run: trainer.load(tmp_path / "first.pt", parts=["models"]))
        assert trainer.fit(3, callbacks=[back])["epoch"] == [2, 3, 4]
        assert not caplog.records
        for row in trainer.epochs(2):
            if row["epoch"] == 5:
                trainer.load(tmp_path / "first.pt")
        assert [record.getMessage() for record in caplog.records] == [
            "epoch 6 of this run is epoch 2 of the trainer, because something else was trained or loaded meanwhile, "
            "or the data changed inside an epoch. "
            'Files say the latter to `resume_from`. `load(path, parts=["models"])` loads no epoch'
        ]

    @pytest.mark.parametrize("method", ["on_progress", "on_step_metrics"])
    def test_are_refused_while_the_workers_are_in_one(self, method: str, make_local: Make, tmp_path: Path) -> None:
        def try_all(run: Run) -> None:
            calls: list[Callable[[], object]] = [
                trainer.validate,
                partial(trainer.validate, blocking=False),
                partial(trainer.predict, torch.ones(2, 3)),
                partial(trainer.update_config, lr=0.5),
                partial(trainer.save, tmp_path / "inside.pt"),
                partial(run.save, tmp_path / "inside.pt"),
                trainer.get_model,
            ]
            for call in calls:
                with pytest.raises(ValueError, match="Validate and save in `on_epoch_trained`"):
                    call()
            trainer.validate()

        trainer, plain = make_local(config={"lr": 0.01}), make_local(config={"lr": 0.01})
        words = rf"in `{method}`: ValueError: .*pass `validate_every_n_steps=100` to `fit`"
        with pytest.raises(CallbackError, match=words):
            trainer.fit(2, callbacks=[Calls(method, try_all)], log_every_n_steps=1)
        assert not (tmp_path / "inside.pt").exists()
        assert [record.kind for record in trainer.history.records] == ["train", "validation"]
        plain.fit(1)
        assert torch.equal(weights(trainer), weights(plain))
        assert trainer.fit(1)["epoch"] == [2]


class TestResuming:
    def test_goes_on_as_if_nothing_had_happened(self, make_local: Make, tmp_path: Path) -> None:
        whole = make_local()
        whole.fit(4)
        first, file = make_local(), tmp_path / "new" / "run" / "last.pt"
        first.fit(2, callbacks=[Counts(), SavesTo(file)])
        second, counts = make_local(), Counts()
        history = second.fit(4, callbacks=[counts], resume_from=file)
        assert torch.equal(weights(second), weights(whole))
        assert history["train_loss"] == whole.history["train_loss"]
        assert history["epoch"] == [1, 2, 3, 4]
        assert counts.calls[0] == ("begin", 2, 2)
        assert counts.num_results == 4
        assert len(second.history) == 2, "the trainer itself made two calls"

    def test_finds_the_newest_checkpoint_or_begins(self, make_local: Make, tmp_path: Path) -> None:
        def fit(epochs: int) -> list[int]:
            old, new = SavesTo(tmp_path / "old.pt"), SavesTo(tmp_path / "new.pt")
            callbacks = [old, new] if epochs == 1 else [new, Stops(after=epochs), old]
            history = make_local().fit(epochs, callbacks=callbacks, resume_from="auto")
            return list(history["epoch"])

        assert fit(1) == [1]
        (tmp_path / "old.pt").rename(tmp_path / "kept.pt")
        assert fit(3) == [1, 2, 3]

    def test_trains_nothing_where_all_is_done_and_says_so(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_local().fit(2, callbacks=[SavesTo(tmp_path / "last.pt")])
        counts = Counts()
        assert "none is left" not in caplog.text
        history = make_local().fit(2, callbacks=[counts], resume_from=tmp_path / "last.pt")
        assert "last.pt` has 2 of 2 epochs, so none is left to train" in caplog.text
        assert history["epoch"] == [1, 2]
        assert counts.calls == [("begin", 2, 2), ("end", None)]

    def test_counts_only_epochs_that_are_complete(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        trainer.train()
        trainer.train(num_steps=2)
        trainer.save(tmp_path / "inside.pt")
        history = make_local().fit(3, resume_from=tmp_path / "inside.pt")
        assert history["epoch"] == [2, 3]
        assert history["batch_count"] == [3, 5]

    def test_says_so_where_there_is_no_such_file(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        with pytest.raises(FileNotFoundError):
            trainer.fit(1, resume_from=tmp_path / "gone.pt")
        assert len(trainer.fit(1)) == 1


class TestTheHistoryOfATrainer:
    def test_has_every_call(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.validate()
        trainer.train(num_steps=2)
        trainer.train()
        trainer.validate(reduce_results=False)
        assert [record.kind for record in trainer.history.records] == ["validation", "train", "train", "validation"]
        assert [record.epoch for record in trainer.history.records] == [0, 1, 1, 1]
        assert trainer.history.records[0].metrics["num_samples"] == 13
        assert trainer.history.records[-1].metrics == {}
        assert trainer.history["batch_count"] == [2, 3]

    def test_is_no_longer_than_is_of_use_while_that_of_a_run_is_whole(
        self, make_local: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history_module, "MOST_EPOCHS", 4)
        trainer = make_local()
        history = trainer.fit(9)
        assert history["epoch"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert trainer.history["epoch"][-3:] == [7, 8, 9]
        assert len(trainer.history) <= 5
        assert trainer.fit(2)["epoch"] == [10, 11]

    def test_has_test_sets_beside_the_rows(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.fit(1)
        result = trainer.test(DataLoader(dataset(7, seed=2), batch_size=4))
        validated = trainer.validate(dataset=DataLoader(dataset(7, seed=2), batch_size=4))
        assert list(result) == [name_in_test(name) for name in validated]
        assert (result["num_samples"], result["test_loss"]) == (7, validated["val_loss"])
        assert trainer.history.records[-2].kind == "test"
        assert "test_loss" not in trainer.history[-1]

    def test_knows_what_happened_to_the_workers(self, make_local: Make) -> None:
        assert [event.kind for event in make_local().history.events] == ["started"]


@pytest.mark.parametrize(
    ("is_terminal", "options", "is_shown"),
    [
        (True, {}, True),
        (True, {"progress": False}, False),
        (False, {}, False),
        (False, {"progress": True}, True),
    ],
)
def test_fit_shows_its_progress_where_someone_looks_on(
    is_terminal: bool,
    options: dict[str, Any],
    is_shown: bool,
    make_local: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal() if is_terminal else io.StringIO())
    callbacks = [HTMLReport(tmp_path / "report.html"), Checkpointing(tmp_path / "saved")]
    make_local().fit(1, callbacks=callbacks, folder=tmp_path, **options)
    told = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("finished in" in told) is is_shown
    assert (f"report: {tmp_path / 'report.html'}" in told) is is_shown
    assert (f"newest checkpoint: {callbacks[1].newest}" in told) is is_shown  # type: ignore[attr-defined]


def test_a_bar_of_the_users_own_is_the_only_one(make_local: Make) -> None:
    own = io.StringIO()
    make_local().fit(1, callbacks=[ProgressBar(stream=own)], progress=True)
    assert own.getvalue().count("finished in") == 1
