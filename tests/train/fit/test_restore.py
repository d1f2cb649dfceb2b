from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig, SyncConfig
from raysgd.storage import open_folder
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.fit.restore import can_restore, restore, save_trainer
from tests.train.fit.notes import Noting, begun_recorder, make_folder


class Trainer:
    """Keeps what it was made with."""

    def __init__(self, train_loop_per_worker: Any, **arguments: Any) -> None:
        self.loop = train_loop_per_worker
        self.arguments = arguments


class Other(Trainer):
    """Takes other arguments."""

    def __init__(self, model: Any) -> None:
        self.model = model


class Derived(Trainer):
    """Takes the same arguments."""


def loop(config: dict[str, Any]) -> None:
    """Does nothing."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that failed."""
    folder = make_folder(tmp_path)
    arguments = {
        "train_loop_per_worker": loop,
        "train_loop_config": {"lr": 0.1},
        "run_config": RunConfig(name="run", storage_path=tmp_path),
    }
    save_trainer(folder.experiment, Trainer, arguments)
    recorder = begun_recorder(folder)
    recorder.end_run(ValueError("x"))
    return tmp_path / "run"


def save_with(tmp_path: Path, **arguments: Any) -> Path:
    save_trainer(open_folder(tmp_path / "run"), Trainer, {"train_loop_per_worker": loop, **arguments})
    return tmp_path / "run"


class TestARun:
    def test_is_restored_with_its_arguments_in_its_folder(self, run: Path) -> None:
        assert can_restore(run)
        trainer, found = restore(Trainer, run)
        assert trainer.loop is loop
        assert trainer.arguments["train_loop_config"] == {"lr": 0.1}
        assert (found.is_finished, found.is_new) == (False, False)
        assert Path(found.trial.path).parent == run

    def test_that_was_moved_is_restored_where_it_is(self, run: Path) -> None:
        moved = run.rename(run.parent / "moved")
        trainer, found = restore(Trainer, f"{moved}/")
        config = trainer.arguments["run_config"]
        assert (config.name, Path(str(config.storage_path))) == ("moved", run.parent)
        assert Path(found.experiment.path) == moved

    def test_that_ended_well_is_finished(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path)
        save_trainer(folder.experiment, Trainer, {"train_loop_per_worker": loop})
        recorder = begun_recorder(folder)
        recorder.end_run()
        assert restore(Trainer, tmp_path / "run")[1].is_finished

    def test_that_was_killed_before_it_began_starts_as_a_new_one(self, tmp_path: Path) -> None:
        path = save_with(tmp_path)
        assert restore(Trainer, path)[1] is None

    @pytest.mark.parametrize(
        "note", [b"", b"[]", b"{}", b'{"trial": "../../x"}', b'{"trial": 7}', b"\xff", b"[" * 100_000]
    )
    def test_with_a_damaged_note_starts_as_a_new_one(
        self, run: Path, note: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        (run / "run.json").write_bytes(note)
        assert restore(Trainer, run)[1] is None
        assert "run.json" in caplog.text


class TestArguments:
    def test_that_are_given_replace_the_saved_ones(self, run: Path) -> None:
        trainer, _ = restore(
            Trainer, run, train_loop_per_worker=print, train_loop_config={"lr": 1}, scaling_config=None
        )
        assert (trainer.loop, trainer.arguments["train_loop_config"]) == (print, {"lr": 1})
        assert "scaling_config" not in trainer.arguments

    def test_datasets_are_given_again(self, tmp_path: Path) -> None:
        path = save_with(tmp_path, datasets={"train": threading.Lock(), "valid": 2})
        trainer, _ = restore(Trainer, path, datasets={"train": 3, "valid": 4})
        assert trainer.arguments["datasets"] == {"train": 3, "valid": 4}

    @pytest.mark.parametrize("given", [None, {}, {"train": 1}, {"train": 1, "valid": 2, "test": 3}])
    def test_other_datasets_are_refused(self, tmp_path: Path, given: Any) -> None:
        path = save_with(tmp_path, datasets={"train": 1, "valid": 2})
        with pytest.raises(ValueError, match=r"`datasets`: the run had \['train', 'valid'\], and `restore` was given"):
            restore(Trainer, path, datasets=given)

    def test_datasets_for_a_run_without_any_are_refused(self, run: Path) -> None:
        with pytest.raises(ValueError, match="the run had none"):
            restore(Trainer, run, datasets={"train": 1})

    def test_a_checkpoint_in_a_folder_is_saved_by_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "large").write_bytes(bytes(1_000_000))
        checkpoint = Checkpoint.from_directory(tmp_path / "state")
        path = save_with(tmp_path, resume_from_checkpoint=checkpoint)
        assert (path / "trainer.pkl").stat().st_size < 100_000
        assert restore(Trainer, path)[0].arguments["resume_from_checkpoint"] == checkpoint

    def test_a_checkpoint_that_is_gone_is_left_out(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "state").mkdir()
        path = save_with(tmp_path, resume_from_checkpoint=Checkpoint.from_directory(tmp_path / "state"))
        (tmp_path / "state").rmdir()
        assert "resume_from_checkpoint" not in restore(Trainer, path)[0].arguments
        assert f"`resume_from_checkpoint` was in {tmp_path / 'state'} and cannot be opened" in caplog.text

    def test_the_keys_of_a_store_are_not_saved(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        uri = "s3://id:planted@bucket/a"
        checkpoint, config = Checkpoint(uri=uri), RunConfig(storage_path=uri, sync_config=SyncConfig(upload_dir=uri))
        path = save_with(tmp_path, resume_from_checkpoint=checkpoint, run_config=config)
        assert b"planted" not in (path / "trainer.pkl").read_bytes()
        assert "resume_from_checkpoint" not in restore(Trainer, path)[0].arguments
        assert "`resume_from_checkpoint` was in s3://***@bucket/a and cannot be opened" in caplog.text
        caplog.clear()
        assert (
            restore(Trainer, path, resume_from_checkpoint=checkpoint)[0].arguments["resume_from_checkpoint"]
            is checkpoint
        )
        assert caplog.text == ""

    def test_callbacks_that_cannot_be_pickled_are_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        callback = Noting()
        callback.lock = threading.Lock()  # type: ignore[attr-defined]
        path = save_with(tmp_path, run_config=RunConfig(callbacks=[callback], stop={"n": 1}))
        config = restore(Trainer, path)[0].arguments["run_config"]
        assert (config.callbacks, config.stop) == (None, {"n": 1})
        assert "a restored run will not have `RunConfig(callbacks=...)`" in caplog.text

    def test_that_cannot_be_pickled_cost_only_the_restoring(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = save_with(tmp_path, metadata=threading.Lock())
        assert not can_restore(path)
        assert "this run continues, but cannot be restored" in caplog.text


class TestWhatIsNoRun:
    def test_an_empty_folder_and_a_missing_one(self, tmp_path: Path) -> None:
        assert not can_restore(tmp_path)
        assert not can_restore(tmp_path / "missing")
        with pytest.raises(ValueError, match=r"there is no run to restore, because there is no `trainer\.pkl`"):
            restore(Trainer, tmp_path)

    def test_a_place_near_by_is_pointed_to(self, run: Path) -> None:
        [trial] = run.glob("TorchTrainer_*")
        for wrong in (trial, trial / "checkpoint_000000", run.parent):
            assert not can_restore(wrong)
            with pytest.raises(ValueError, match=rf"Did you mean '{run}'\?"):
                restore(Trainer, wrong)

    @pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(7), pickle.dumps((1, 2, 3))])
    def test_a_damaged_file(self, run: Path, content: bytes) -> None:
        (run / "trainer.pkl").write_bytes(content)
        with pytest.raises(ValueError, match=r"`trainer\.pkl` cannot be read"):
            restore(Trainer, run)


class TestOtherClasses:
    def test_that_take_the_arguments_come_with_a_warning(self, run: Path) -> None:
        with pytest.warns(UserWarning, match="Invalid trainer type"):
            trainer, _ = restore(Derived, run)
        assert isinstance(trainer, Derived)

    def test_that_do_not_are_refused(self, run: Path) -> None:
        with (
            pytest.warns(UserWarning, match="Invalid trainer type"),
            pytest.raises(ValueError, match="`Other` cannot be made with the arguments of `Trainer`"),
        ):
            restore(Other, run)


class TestATrainerOfFunctions:
    def test_takes_another_function_and_its_argument_behind_the_folder(self, tmp_path: Path) -> None:
        saved = {"train_loop_per_worker": loop, "train_loop_config": {"lr": 0.1}, "metadata": {"by": "me"}}
        save_trainer(open_folder(tmp_path / "run"), DataParallelTrainer, saved)

        def other(config: dict[str, Any]) -> None:
            """Does nothing either."""

        restored = DataParallelTrainer.restore(tmp_path / "run", other, {"lr": 1})
        assert restored._arguments["train_loop_per_worker"] is other
        assert (restored._trial_config, restored.metadata) == ({"train_loop_config": {"lr": 1}}, {"by": "me"})
        assert DataParallelTrainer.restore(tmp_path / "run")._trial_config == {"train_loop_config": {"lr": 0.1}}

    def test_refuses_names_that_it_does_not_know(self, tmp_path: Path) -> None:
        save_trainer(open_folder(tmp_path / "run"), DataParallelTrainer, {"train_loop_per_worker": loop})
        with pytest.raises(TypeError, match=r"train_loop_confg.*`train_loop_config`"):
            DataParallelTrainer.restore(tmp_path / "run", train_loop_confg={"lr": 1})
