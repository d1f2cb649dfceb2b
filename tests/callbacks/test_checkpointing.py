from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from raysgd.callbacks import Callback, Checkpointing, EarlyStopping, Run
from raysgd.callbacks.checkpointing import INDEX_FILE
from raysgd.core.cluster.keeper import Keeper
from raysgd.exceptions import CallbackError
from raysgd.testing import fail_save
from raysgd.torch import TorchTrainer
from tests.helpers.s3_server import S3Server

if TYPE_CHECKING:  # the tests of the rest run without it, too
    from raysgd.trainer.driver.kept_trainer import KeptTrainer

Make = Callable[..., TorchTrainer]


class Scores(Callback):
    """Puts given values into the results, for those behind it to see."""

    def __init__(self, *scores: float | None, name: str = "val_score") -> None:
        self._scores, self._name = scores, name

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        score = self._scores[run.epoch - 1]
        if score is not None:
            result[self._name] = score


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoints_in(folder: Path) -> list[int]:
    """The epochs of the checkpoints, each of which has its file beside it."""
    names = [name for name in files_in(folder) if name != INDEX_FILE]
    found = [name for name in names if name.endswith(".ckpt")]
    assert sorted([*found, *(f"{name}.run.json" for name in found)]) == names
    return [int(name[len("epoch_") : -len(".ckpt")]) for name in found]


def test_checkpoints_do_not_leave_the_folder_of_the_run_through_a_link(make_local: Make, tmp_path: Path) -> None:
    for name in ("mine", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mine")
    with pytest.raises(CallbackError, match="leads out of the run's folder: remove the link"):
        make_local().fit(1, folder=tmp_path / "run", callbacks=[Checkpointing()])
    assert files_in(tmp_path / "mine") == []


class TestWhatIsKept:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [5]),
            ({"keep_last": 2}, [4, 5]),
            ({"keep_last": None}, [1, 2, 3, 4, 5]),
            ({"every_n_epochs": 2, "keep_last": None}, [2, 4, 5]),
            ({"metric": "val_score"}, [2, 5]),
            ({"metric": "val_score", "mode": "max", "keep_best": 2}, [1, 4, 5]),
            ({"metric": "val_score", "keep_best": 0}, [5]),
        ],
    )
    def test_of_five_epochs(
        self, make_local: Make, tmp_path: Path, options: dict[str, Any], expected: list[int]
    ) -> None:
        saving = Checkpointing(tmp_path, **options)
        make_local().fit(5, callbacks=[Scores(5.0, 1.0, float("nan"), 4.0, 3.0), saving])
        assert checkpoints_in(tmp_path) == expected
        assert saving.newest == str(tmp_path / "epoch_0005.ckpt")

    def test_the_highest_accuracy_is_the_best(self, make_local: Make, tmp_path: Path) -> None:
        saving = Checkpointing(tmp_path, metric="val_accuracy")
        make_local().fit(3, callbacks=[Scores(0.2, 0.9, 0.1, name="val_accuracy"), saving])
        assert (checkpoints_in(tmp_path), saving.best_score) == ([2, 3], 0.9)

    @pytest.mark.parametrize(("scores", "epoch"), [((None, 1.0, 2.0), 2), ((1.0, 1.0, None), 2), ((None,) * 3, None)])
    def test_of_equals_the_newer_is_the_best_and_what_has_no_score_never_is(
        self, make_local: Make, tmp_path: Path, scores: tuple[float | None, ...], epoch: int | None
    ) -> None:
        saving = Checkpointing(tmp_path, keep_last=None, metric="val_score")
        make_local().fit(3, callbacks=[Scores(*scores), saving], validation_freq=0)
        expected = (None, None) if epoch is None else (str(tmp_path / f"epoch_{epoch:04d}.ckpt"), scores[epoch - 1])
        assert (saving.best, saving.best_score) == expected

    def test_the_best_one_can_be_loaded_at_the_end(self, make_local: Make, tmp_path: Path) -> None:
        saving = Checkpointing(tmp_path, metric="val_score", restore_best_at_end=True)
        trainer = make_local()
        trainer.fit(3, callbacks=[Scores(2.0, 1.0, 3.0), saving])
        other = make_local()
        other.fit(2)
        assert torch.equal(trainer.get_model().weight, other.get_model().weight)


class TestResuming:
    def test_from_the_newest_one(self, make_local: Make, tmp_path: Path) -> None:
        def callbacks() -> tuple[Checkpointing, EarlyStopping]:
            return Checkpointing(tmp_path, metric="val_loss"), EarlyStopping("val_loss", patience=50)

        make_local().fit(2, callbacks=callbacks(), resume_from="auto")
        saving, stopping = callbacks()
        trainer = make_local()
        history = trainer.fit(4, callbacks=[saving, stopping], resume_from="auto")
        whole = make_local().fit(4)
        assert [row["val_loss"] for row in history] == pytest.approx([row["val_loss"] for row in whole], abs=1e-6)
        assert checkpoints_in(tmp_path) == [4]  # also the best one: the two before were found and deleted
        assert (stopping.best_epoch, saving.best) == (4, saving.newest)

    def test_where_it_was_stopped_early_trains_no_more(self, make_local: Make, tmp_path: Path) -> None:
        for _ in range(3):
            stopping = EarlyStopping("val_score", "min", patience=1)
            callbacks = [Scores(1.0, 2.0, 3.0, 4.0), Checkpointing(tmp_path), stopping]
            trainer = make_local()
            history = trainer.fit(4, callbacks=callbacks, resume_from="auto")
            assert (len(history), checkpoints_in(tmp_path)) == (2, [2])
            assert history.stop_reason is not None
        assert len(trainer.history) == 0
        later = [Scores(1.0, 2.0, 3.0, 4.0), Checkpointing(tmp_path), EarlyStopping("val_score", "min", patience=2)]
        assert len(make_local().fit(4, callbacks=later, resume_from="auto")) == 3

    def test_states_are_those_after_the_epoch_wherever_it_stands_in_the_list(
        self, make_local: Make, tmp_path: Path
    ) -> None:
        make_local().fit(1, callbacks=[Checkpointing(tmp_path), EarlyStopping("val_loss")])
        [path] = tmp_path.glob("*.run.json")
        [saving, stopping] = sorted(json.loads(path.read_text())["callbacks"], key=lambda each: str(each["name"]))
        assert stopping["state"]["best_epoch"] == 1
        assert saving["state"]["saved"][0]["name"] == "epoch_0001.ckpt"

    def test_another_run_in_the_same_folder_warns(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_local().fit(2, callbacks=[Checkpointing(tmp_path)])
        saving = Checkpointing(tmp_path)
        make_local().fit(1, callbacks=[saving])
        assert "has 1 checkpoints of another run" in caplog.text
        assert checkpoints_in(tmp_path) == [1, 2]
        assert Checkpointing(tmp_path).newest_checkpoint(Run(name="x")) == str(tmp_path / "epoch_0001.ckpt")

    def test_another_run_that_saves_nothing_leaves_the_list_as_it_is(self, make_local: Make, tmp_path: Path) -> None:
        make_local().fit(2, callbacks=[Checkpointing(tmp_path)])
        make_local().fit(0, callbacks=[Checkpointing(tmp_path)])
        assert Checkpointing(tmp_path).newest_checkpoint(Run(name="x")) == str(tmp_path / "epoch_0002.ckpt")

    def test_a_list_that_names_files_of_the_user_deletes_none(self, make_local: Make, tmp_path: Path) -> None:
        make_local().fit(1, callbacks=[Checkpointing(tmp_path / "theirs")])
        beside = tmp_path / "theirs" / "epoch_0001.ckpt.run.json"
        content = json.loads(beside.read_text())
        content["callbacks"][0]["state"]["saved"] = [{"name": "thesis.txt", "epoch": 0, "score": None}]
        beside.write_text(json.dumps(content))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("")
        resumed = str(tmp_path / "theirs" / "epoch_0001.ckpt")
        with pytest.raises(CallbackError, match=r"the name of a checkpoint is 'thesis\.txt', not 'epoch_0000\.ckpt'"):
            make_local().fit(2, callbacks=[Checkpointing(tmp_path / "mine", keep_last=1)], resume_from=resumed)
        assert files_in(tmp_path / "mine") == ["thesis.txt"]

    def test_in_the_folder_of_the_run(self, make_local: Make, tmp_path: Path) -> None:
        for epochs in (2, 3):
            trainer = make_local()
            trainer.fit(epochs, callbacks=[Checkpointing()], folder=tmp_path, resume_from="auto")
        assert len(trainer.history) == 1
        assert checkpoints_in(tmp_path / "checkpoints") == [3]

    @pytest.mark.parametrize("text", ['{"saved": [{}]}', "[" * 100_000], ids=["incomplete", "deep"])
    def test_a_damaged_index_is_said(self, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / INDEX_FILE).write_text(text)
        assert Checkpointing(tmp_path).newest_checkpoint(Run(name="x")) is None
        assert "is damaged" in caplog.text

    def test_a_second_call_of_fit_goes_on(self, make_local: Make, tmp_path: Path) -> None:
        saving, trainer = Checkpointing(tmp_path, keep_last=3), make_local()
        for _ in range(2):
            trainer.fit(2, callbacks=[saving])
        assert checkpoints_in(tmp_path) == [2, 3, 4]


class TestResumingBesideADetachedTrainer:
    """What the trainer's process saves in the folder of `raysgd.Detached`, by hand."""

    def keep(self, trainer: TorchTrainer, file: Path) -> KeptTrainer:
        return trainer._kept_by(Keeper("left", lambda group: None), str(file), note_fit=None)

    def leave(self, trainer: TorchTrainer, file: Path) -> None:
        self.keep(trainer, file).save_left("it was not needed any more")

    @pytest.mark.parametrize(("num_saved", "num_left"), [(1, 2), (2, 1), (2, 2)])
    def test_the_file_with_more_epochs_is_taken(
        self, make_local: Make, tmp_path: Path, num_saved: int, num_left: int
    ) -> None:
        make_local().fit(num_saved, callbacks=[Checkpointing(tmp_path / "saved")])
        left = make_local()
        left.fit(num_left)
        self.leave(left, tmp_path / "left.pt")
        trainer = make_local()
        self.keep(trainer, tmp_path / "left.pt")
        loaded = list[str]()
        load = trainer.load
        trainer.load = lambda path: (loaded.append(Path(path).name), load(path))  # type: ignore[method-assign]
        history = trainer.fit(3, callbacks=[Checkpointing(tmp_path / "saved")], resume_from="auto")
        assert loaded == ["left.pt" if num_left > num_saved else "epoch_0002.ckpt"]
        assert [row["epoch"] for row in history] == [1, 2, 3]
        assert history.stop_reason is None

    def test_no_callback_has_to_find_checkpoints(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        self.keep(trainer, tmp_path / "left.pt")
        assert len(trainer.fit(1, resume_from="auto")) == 1


class TestWhatCannotBeWritten:
    def test_a_full_disk_for_an_epoch_costs_that_checkpoint(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class FullInTheSecondEpoch(Callback):
            fault = ExitStack()

            def on_result(self, run: Run, result: dict[str, Any]) -> None:
                if run.epoch == 2:
                    self.fault.enter_context(fail_save(run.trainer, after_bytes=100))

            def on_epoch_begin(self, run: Run) -> None:
                self.fault.close()

        trainer = make_local()
        history = trainer.fit(4, callbacks=[FullInTheSecondEpoch(), Checkpointing(tmp_path, every_n_epochs=2)])
        assert len(history) == 4
        assert checkpoints_in(tmp_path) == [4]
        [warning] = [each.getMessage() for each in caplog.records if "Checkpointing" in each.getMessage()]
        assert "could not save epoch 2" in warning
        assert "No space left on device" in warning

    def test_half_a_checkpoint_does_not_stay(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        in_the_way = tmp_path / "epoch_0002.ckpt.run.json"
        in_the_way.mkdir()
        saving = Checkpointing(tmp_path, keep_last=3)
        make_local().fit(3, callbacks=[saving])
        in_the_way.rmdir()
        assert checkpoints_in(tmp_path) == [1, 3]
        assert "could not save epoch 2" in caplog.text

    def test_several_in_a_row_end_the_run_and_the_state_is_kept(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        with fail_save(trainer), pytest.raises(CallbackError, match=r"Checkpointing.*No space") as error:
            trainer.fit(9, callbacks=[Checkpointing(tmp_path, max_failures=2)])
        assert isinstance(error.value.__cause__, OSError)
        assert (len(trainer.history), checkpoints_in(tmp_path)) == (2, [])
        trainer.fit(1, callbacks=[Checkpointing(tmp_path)])
        assert checkpoints_in(tmp_path) == [3]

    def test_it_may_never_end_the_run(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        with fail_save(trainer, OSError(errno.EIO, os.strerror(errno.EIO))):
            assert len(trainer.fit(5, callbacks=[Checkpointing(tmp_path, max_failures=None)])) == 5

    def test_a_folder_that_cannot_be_made_is_refused_before_the_first_epoch(
        self, make_local: Make, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        trainer = make_local()
        with pytest.raises(CallbackError, match=r"`Checkpointing` failed in `on_run_begin`.*cannot be written to"):
            trainer.fit(1, callbacks=[Checkpointing(tmp_path / "file" / "checkpoints", max_failures=None)])
        assert len(trainer.history) == 0

    @pytest.mark.soak  # the SDK of the store takes its time
    def test_a_store_that_cannot_be_reached(
        self, make_local: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0.1")
        uri = "s3://id:secret@bucket/run?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1"
        trainer = make_local()
        with pytest.raises(CallbackError, match="Checkpointing") as error:
            trainer.fit(2, callbacks=[Checkpointing(uri)])
        assert "secret" not in str(error.value) + caplog.text
        assert len(trainer.history) == 0


def test_in_a_store(make_local: Make, s3_server: S3Server) -> None:
    uri = s3_server.uri("callbacks/run")
    saving = Checkpointing(uri, keep_last=2, metric="val_loss")
    make_local().fit(4, callbacks=[saving])
    other, trainer = Checkpointing(uri), make_local()
    trainer.fit(5, callbacks=[other], resume_from="auto")
    assert len(trainer.history) == 1
    assert saving.newest != other.newest
    trainer.load(other.newest)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"folder": 5}, TypeError, "`folder=5`"),
        ({"every_n_epochs": 0}, ValueError, "`every_n_epochs=0`"),
        ({"keep_last": 0}, ValueError, "`keep_last=0`"),
        ({"keep_best": 2}, ValueError, "needs a `metric`"),
        ({"keep_best": -1, "metric": "a"}, ValueError, "`keep_best=-1`"),
        ({"metric": "a", "mode": "least"}, ValueError, "allowed are"),
        ({"max_failures": 0}, ValueError, "`max_failures=0`"),
        ({"restore_best_at_end": True}, ValueError, "needs a `metric`"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Checkpointing(**options)


def test_functions_save_their_own(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="class-based trainers"):
        Checkpointing(tmp_path).on_run_begin(Run(name="function"))
