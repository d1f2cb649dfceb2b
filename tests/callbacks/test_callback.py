from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import Callback, Run, WorkerCallback, callback


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
        monkeypatch.setattr(Path, "exists", lambda path: False)  # as if others looked at the same time
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
    assert nothing.newest_checkpoint(run) is None
    assert nothing.state_dict() is None


@pytest.mark.parametrize(("base", "name"), [(Callback, "on_epoch_end"), (WorkerCallback, "on_result")])
def test_an_event_that_there_is_not_is_warned_of(base: type[Any], name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = type("Mine", (base,), {name: lambda self: None, "on_epoch_begin": lambda self, run: None, "once": 1})
    [record] = caplog.records
    assert f"`Mine.{name}` is never called: `{base.__name__}` has the events on_" in record.getMessage()
    type("Derived", (made,), {name: lambda self: None})
    assert len(caplog.records) == 1, "one warning for each name"


def test_methods_of_another_base_class_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def on_disk(self) -> None: ...

    class Both(Callback, Other):
        def on_disk(self) -> None: ...

    assert Both
    assert caplog.records == []
