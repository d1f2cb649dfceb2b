from __future__ import annotations

from pathlib import Path

import pytest

from raysgd.callbacks import Callback, Run, callback


class TestTheFolderOfARun:
    def test_is_made_when_it_is_first_read(self, tmp_path: Path) -> None:
        run = Run(name="line", folder=tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()
        assert run.folder == tmp_path / "a" / "b"
        assert run.folder.is_dir()

    def test_is_a_new_one_for_each_run_without_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(callback, "RESULTS_FOLDER", tmp_path)
        runs = [Run(name="line"), Run(name="line")]
        for run in runs:
            run.started_at = 0.0
        folders = {run.folder for run in runs}
        assert len(folders) == 2
        assert all(folder.parent == tmp_path and folder.name.startswith("line_19") for folder in folders)


class TestStopping:
    def test_keeps_the_first_reason(self) -> None:
        run = Run(name="line")
        assert not run.is_stopping
        run.stop("enough")
        run.stop("too late")
        assert run.is_stopping
        assert run.history.stop_reason == "enough"

    def test_says_so_where_nothing_can_stop_the_run(self) -> None:
        run = Run(name="line", obstacle_to_stop="the function decides")
        with pytest.raises(NotImplementedError, match="the function decides"):
            run.stop("enough")
        assert not run.is_stopping


def test_only_class_based_trainers_can_be_saved() -> None:
    with pytest.raises(NotImplementedError, match="a training function saves its own checkpoints"):
        Run(name="line").save("last.pt")


def test_a_callback_does_nothing_by_itself() -> None:
    run, nothing = Run(name="line"), Callback()
    nothing.on_run_begin(run)
    nothing.on_epoch_begin(run)
    nothing.on_result(run, {"loss": 1.0})
    nothing.on_checkpoint(run, "last.pt")
    nothing.on_run_end(run, None)
    assert nothing.worker_callback() is None
    assert nothing.newest_checkpoint(run) is None
    assert nothing.state_dict() is None
