"""Files on their way, and what is tried again."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from raysgd.storage._retrying import limit_s, may_pass, retried, storage_error
from raysgd.storage._transfers import fetch, on_threads, send, send_and_rename
from tests.helpers.fakes import FakeClock


def file_of(content: Callable[[], Iterator[bytes]]) -> Any:
    """Return a file whose content is made as it is read."""
    pieces = content()
    return SimpleNamespace(seek=lambda place: None, read=lambda size: next(pieces, b""))


def test_a_file_is_sent_to_its_end_also_after_ctrl_c(tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        yield b"first"
        os.kill(os.getpid(), signal.SIGINT)
        yield b"second"

    with pytest.raises(KeyboardInterrupt):
        send(fs.LocalFileSystem(), file_of(content), str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"firstsecond"


def test_a_file_that_is_seen_as_it_grows_has_another_name_until_it_is_complete(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def content() -> Iterator[bytes]:
        yield b"first"
        seen.append([path.name for path in (tmp_path / "folder").iterdir()])
        yield b"second"

    send_and_rename(fs.LocalFileSystem(), file_of(content), str(tmp_path / "folder" / "file"))
    [[name]] = seen
    assert name.startswith(".raysgd-")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert (tmp_path / "folder" / "file").read_bytes() == b"firstsecond"


@pytest.mark.parametrize("error", [OSError("gone"), KeyboardInterrupt()], ids=repr)
def test_a_file_that_could_not_be_sent_leaves_the_former_one(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def content() -> Iterator[bytes]:
        yield b"half"
        raise error

    with pytest.raises(type(error)):
        send_and_rename(fs.LocalFileSystem(), file_of(content), str(tmp_path / "file"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_a_second_attempt_to_fetch_begins_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with tempfile.TemporaryFile() as target:
        target.write(b"longer than the content")
        fetch(fs.LocalFileSystem(), str(tmp_path / "file"), target)
        target.seek(0)
        assert target.read() == b"content"


def test_after_a_failure_no_more_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, count, is_noticed = [], itertools.count(), threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def notice(pool: ThreadPoolExecutor, *, cancel_futures: bool) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        is_noticed.set()
        shutdown(pool)

    def work(name: str) -> None:
        begun.append(name)
        if next(count) == 0:
            raise OSError(name)
        assert is_noticed.wait(60)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", notice)
    with pytest.raises(OSError, match="0"):
        on_threads(work, [str(number) for number in range(100)])
    assert len(begun) <= 9, "by eight threads, and by the one that failed once more before that was noticed"


PASSES = [
    ConnectionResetError("reset"),
    TimeoutError("late"),
    OSError("AWS Error ACCESS_DENIED during HeadObject operation: its words may mean anything"),
    OSError(errno.EIO, "Input/output error"),
    RuntimeError("of a library that has errors of its own"),
]
LASTS = [
    FileNotFoundError("x"),
    PermissionError("x"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("no such option"),
    NotImplementedError("read only"),
    ModuleNotFoundError("gcsfs"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", PASSES, ids=repr)
def test_what_may_pass(error: BaseException) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", LASTS, ids=repr)
def test_what_lasts(error: BaseException) -> None:
    assert not may_pass(error)


def call(clock: FakeClock, attempt: Callable[[], str], total_s: float = 60) -> str:
    return retried(attempt, "read `x`", total_s, clock=clock.monotonic, sleep=clock.sleep)


def failing(times: int, error: Exception) -> Callable[[], str]:
    count = itertools.count(1)

    def attempt() -> str:
        if next(count) <= times:
            raise error
        return "done"

    return attempt


def test_what_passes_is_tried_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    clock, limits = FakeClock(), [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    with caplog.at_level(logging.WARNING):
        assert call(clock, failing(8, ConnectionResetError("gone"))) == "done"
    assert all(0.75 * limit <= pause <= limit for pause, limit in zip(clock.sleeps, limits, strict=True))
    assert "could not read `x`, trying again in" in caplog.text
    assert "gone" in caplog.text


def test_what_lasts_is_raised_at_once() -> None:
    clock = FakeClock()
    with pytest.raises(PermissionError):
        call(clock, failing(1, PermissionError("x")))
    assert clock.sleeps == []


def test_what_does_not_pass_in_time_is_raised() -> None:
    clock = FakeClock()
    with pytest.raises(ConnectionResetError):
        call(clock, failing(1000, ConnectionResetError("gone")), total_s=10)
    assert 2 < sum(clock.sleeps) <= 10
    impatient = FakeClock()
    with pytest.raises(ConnectionResetError):
        call(impatient, failing(1, ConnectionResetError("gone")), total_s=0)
    assert impatient.sleeps == []


def test_the_environment_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSGD_STORAGE_TIMEOUT_S", raising=False)
    assert limit_s() == 60
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "2.5")
    assert limit_s() == 2.5


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_the_environment_has_to_say_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"`RAYSGD_STORAGE_TIMEOUT_S='{text}'`: need a number of seconds"):
        limit_s()


def test_an_error_says_what_why_and_what_to_do() -> None:
    told = storage_error("write `s3://b/x`", OSError("AWS Error ACCESS_DENIED\nmore"), "Check the credentials.")
    assert str(told) == "could not write `s3://b/x`: AWS Error ACCESS_DENIED. Check the credentials."
    full = storage_error("write `/x`", OSError(errno.ENOSPC, "No space left on device", "/x"), "Check the disk.")
    assert str(full) == "could not write `/x`: No space left on device. Free some space there, or use another place."
    assert full.errno == errno.ENOSPC
