from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks.callback import Callback
from raysgd.storage import open_folder
from raysgd.train.callbacks import TrainingCallback
from raysgd.train.trainer import TrainerCallbacks


class Noting(TrainingCallback):
    """Notes its calls, and raises at the end if it is to."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str, error: Exception | None = None) -> None:
        self.calls, self.name, self.error = calls, name, error

    def start_training(self, logdir: str, config: Any, **info: Any) -> None:
        self.calls.append((self.name, "start", logdir, config))

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.calls.append((self.name, "results", results))

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.calls.append((self.name, "finish", error))
        if self.error is not None:
            raise self.error


def test_all_are_called_in_their_order() -> None:
    calls: list[tuple[Any, ...]] = []
    callbacks = TrainerCallbacks([Noting(calls, "a"), Noting(calls, "b")])
    with callbacks.around(Path("run"), None):
        callbacks.process([{"loss": 1}])
    assert calls == [
        ("a", "start", "run", {}),
        ("b", "start", "run", {}),
        ("a", "results", [{"loss": 1}]),
        ("b", "results", [{"loss": 1}]),
        ("a", "finish", False),
        ("b", "finish", False),
    ]


def test_all_hear_of_a_failed_run_and_none_of_them_hides_it(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[tuple[Any, ...]] = []
    callbacks = TrainerCallbacks([Noting(calls, "a", OSError("disk full")), Noting(calls, "b")])
    with pytest.raises(KeyError), callbacks.around(Path("run"), {"lr": 1}):
        raise KeyError("bad sample")
    assert calls[2:] == [("a", "finish", True), ("b", "finish", True)]
    assert "the callback `Noting` failed at the end: disk full" in caplog.text


class Reading(TrainingCallback):
    """Writes a file at the start, and notes the checkpoints at the end."""

    def __init__(self, reads_checkpoints: bool) -> None:
        self.reads_checkpoints = reads_checkpoints
        self.found: list[str] | None = None

    def start_training(self, logdir: str, **info: Any) -> None:
        self.logdir = Path(logdir)
        (self.logdir / "log").write_text("started")

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self.found = sorted(str(path.relative_to(self.logdir)) for path in self.logdir.rglob("*") if path.is_file())


@pytest.mark.parametrize("reads_checkpoints", [True, False])
def test_with_a_store_callbacks_have_a_folder_of_this_machine(
    reads_checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    run_dir = open_folder(f"memory://run-callbacks/{reads_checkpoints}")
    callback = Reading(reads_checkpoints)
    with TrainerCallbacks([callback]).around(run_dir, None):
        (run_dir / "checkpoints").write("checkpoint_000001", b"1")
    assert callback.found == ["checkpoints/checkpoint_000001", "log"][not reads_checkpoints :]
    assert run_dir.read("log") == b"started"
    assert run_dir.names() == ["checkpoints", "log"]


def test_only_callbacks_of_the_library_wait_for_checkpoints() -> None:
    assert not TrainerCallbacks([Noting([], "a")]).are_told_of_checkpoints
    assert TrainerCallbacks([Noting([], "a"), Callback()]).are_told_of_checkpoints


def test_without_callbacks_no_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.train.constants.DEFAULT_RESULTS_DIR", tmp_path)
    with TrainerCallbacks(None).around(open_folder("memory://run-callbacks/none"), None):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("callbacks", ["json", 3, [Noting], [print]])
def test_what_is_no_callback_is_refused(callbacks: Any) -> None:
    with pytest.raises(TypeError, match="`callbacks"):
        TrainerCallbacks(callbacks)
