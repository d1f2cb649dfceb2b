from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from raysgd.storage._transfers import fetch, on_threads, send, send_and_rename


def test_a_file_is_sent_to_its_end_also_after_ctrl_c(tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        yield b"first"
        os.kill(os.getpid(), signal.SIGINT)
        yield b"second"

    with pytest.raises(KeyboardInterrupt):
        send(fs.LocalFileSystem(), content, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"firstsecond"


def test_a_file_that_is_seen_as_it_grows_has_another_name_until_it_is_complete(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def content() -> Iterator[bytes]:
        yield b"first"
        seen.append([path.name for path in (tmp_path / "folder").iterdir()])
        yield b"second"

    send_and_rename(fs.LocalFileSystem(), content, str(tmp_path / "folder" / "file"))
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
        send_and_rename(fs.LocalFileSystem(), content, str(tmp_path / "file"))
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
