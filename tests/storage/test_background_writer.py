"""Files written in the background: in order, to their end, and which failures stop what comes later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import WorkersLostError
from raysgd.storage.background_writer import BackgroundWriter, SubmittedWrite


class ToDisk(BackgroundWriter):
    """Keeps what it writes by the names of the files."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Any] = {}

    def submit(self, path: Any, produce: Callable[[], Any], write: Any = None) -> SubmittedWrite:
        return super().submit(path, produce, self._keep)

    def write(self, path: Any, state: Any, write: Any = None) -> None:
        super().write(path, state, self._keep)

    def _keep(self, path: str, state: Any) -> None:
        name = os.path.basename(path)
        if name == "full":
            raise OSError("no space")
        self.files[name] = state


@pytest.fixture
def writer() -> ToDisk:
    return ToDisk()


def failing(error: BaseException) -> Callable[[], Any]:
    def produce() -> Any:
        raise error

    return produce


lost = failing(WorkersLostError("lost with its worker"))


def writer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("raysgd-checkpoint")]


def await_writers() -> None:
    for thread in writer_threads():
        thread.join(60)


# ------------------------------------------------------------------------------------------------ files


def test_files_are_written_in_the_order_of_submission(writer: ToDisk) -> None:
    produced: list[int] = []

    def produce(epoch: int) -> int:
        produced.append(epoch)
        return epoch

    for epoch in range(5):
        writer.submit("last", lambda epoch=epoch: produce(epoch))
    writer.wait()
    assert (produced, writer.files) == ([0, 1, 2, 3, 4], {"last": 4})
    writer.close()


def test_submit_does_not_wait_for_the_write(writer: ToDisk) -> None:
    go_on = threading.Event()
    names: list[str] = []

    def produce() -> int:
        names.append(threading.current_thread().name)
        assert go_on.wait(60)
        return 1

    writer.submit("last", produce)
    assert writer.files == {}
    go_on.set()
    writer.close()
    assert (writer.files, names) == ({"last": 1}, ["raysgd-checkpoint-writer"])


def test_several_threads_may_submit(writer: ToDisk) -> None:
    threads = [threading.Thread(target=writer.submit, args=(str(i), lambda i=i: i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert writer.files == {str(i): i for i in range(8)}


def test_no_thread_is_left_when_there_is_nothing_to_write(writer: ToDisk) -> None:
    assert writer_threads() == []
    for epoch in range(3):
        writer.submit("last", lambda epoch=epoch: epoch)
        writer.wait()
        assert writer_threads() == []
    writer.close()


def test_a_closed_writer_accepts_nothing(writer: ToDisk) -> None:
    writer.close()
    writer.close()
    writer.wait()
    with pytest.raises(ValueError, match="closed `ToDisk`"):
        writer.submit("last", int)


def test_a_file_lands_where_its_path_led_when_it_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, has_moved = tmp_path / "before", tmp_path / "after", threading.Event()
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    writer = BackgroundWriter()
    writer.submit("last.pt", lambda: str(has_moved.wait(10)), lambda path, state: Path(path).write_text(state))
    monkeypatch.chdir(after)
    has_moved.set()
    writer.close()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")] == ["before/last.pt"]


def test_a_program_that_ends_finishes_its_write_and_ends(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from raysgd.storage.background_writer import BackgroundWriter, SubmittedWrite

def produce():
    time.sleep(0.5)
    return "written"

BackgroundWriter().submit(sys.argv[1], produce, lambda path, state: Path(path).write_text(state))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "last")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last").read_text() == "written"


# ------------------------------------------------------------------------------------------------ failures


def test_a_failure_is_logged_at_once_and_raised_once_as_its_own_class(
    writer: ToDisk, caplog: pytest.LogCaptureFixture
) -> None:
    writer.submit("a.pt", failing(KeyError("lost")))
    with pytest.raises(KeyError, match="lost"):
        writer.wait()
    writer.wait()
    writer.submit("full", int)
    with pytest.raises(OSError, match="no space"):
        writer.close()
    writer.close()
    assert "could not write checkpoint" in caplog.text
    assert "a.pt" in caplog.text


def test_a_single_write_is_waited_for_and_takes_its_failure_with_it(writer: ToDisk) -> None:
    started = threading.Event()
    first = writer.submit("a", lambda: started.wait(60))
    second = writer.submit("full", int)
    assert not first.is_done
    started.set()
    first.wait()
    assert first.is_done
    assert writer.files == {"a": True}
    with pytest.raises(OSError, match="no space"):
        second.wait()
    second.wait()
    writer.close()


def test_submit_raises_an_earlier_failure_and_queues_nothing(writer: ToDisk) -> None:
    writer.submit("a", failing(KeyError("lost")))
    await_writers()
    with pytest.raises(KeyError):
        writer.submit("b", int)
    writer.submit("c", int)
    writer.close()
    assert writer.files == {"c": 0}


def test_each_failure_is_raised_once_and_the_oldest_first(writer: ToDisk) -> None:
    started = threading.Event()

    def fail_late() -> None:
        assert started.wait(60)
        raise KeyError("first")

    writer.submit("a", fail_late)
    writer.submit("b", failing(OSError("second")))
    writer.submit("c", int)
    started.set()
    with pytest.raises(KeyError, match="first"):
        writer.wait()
    with pytest.raises(OSError, match="second"):
        writer.close()
    writer.close()
    assert writer.files == {"c": 0}


def test_a_failure_does_not_keep_the_state_alive(writer: ToDisk) -> None:
    states: list[Any] = []

    def produce() -> threading.Event:
        state = threading.Event()
        states.append(weakref.ref(state))
        return state

    writer.submit("full", produce)
    await_writers()
    assert states[0]() is None
    with pytest.raises(OSError, match="no space"):
        writer.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_a_state_that_was_lost_is_made_up_for_by_a_later_file(in_background: bool, writer: ToDisk) -> None:
    writer.submit("first", lost)
    if in_background:
        writer.submit("second", lambda: {"epoch": 2})
    else:
        writer.write("second", {"epoch": 2})
    writer.close()
    assert writer.files == {"second": {"epoch": 2}}


def test_a_state_that_was_lost_and_not_made_up_for_is_told_by_the_end(writer: ToDisk) -> None:
    writer.write("first", {"epoch": 1})
    writer.submit("second", lost)
    with pytest.raises(WorkersLostError, match="lost with its worker"):
        writer.close()
    writer.close()


def test_other_failures_stop_the_next_write_as_ever(writer: ToDisk) -> None:
    writer.submit("first", lost)
    writer.submit("full", dict)
    with pytest.raises(OSError, match="no space"):
        writer.write("third", {})
    with pytest.raises(WorkersLostError):
        writer.wait()


def test_a_thread_that_cannot_start_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, written = BackgroundWriter(), list[str]()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        writer.submit(tmp_path / "first", lambda: 1, lambda path, state: written.append(path))
    monkeypatch.undo()
    assert writer._writes == []
    writer.submit(tmp_path / "second", lambda: 2, lambda path, state: written.append(path))
    writer.close()
    assert written == [str(tmp_path / "second")]


def test_a_file_that_is_being_written_is_not_done_after_ctrl_c_in_a_wait_for_it(writer: ToDisk) -> None:
    may_end = threading.Event()

    def produce() -> str:
        may_end.wait()
        return "first"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    submitted, before = writer.submit("first", produce), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            submitted.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not submitted.is_done
    writer.submit("second", lambda: "second")
    may_end.set()
    writer.close()
    assert list(writer.files) == ["first", "second"]
