"""A folder has one owner at a time, and its death frees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.files import home_of_processes
from raysgd.storage import Folder, open_folder, owner
from raysgd.storage.owner import FILE, owning
from tests.helpers.stories import ROOT

PROGRAM = """
import sys, time
from raysgd.storage import open_folder
from raysgd.storage.owner import owning
with owning(open_folder(sys.argv[1])):
    print("owns", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that dies has little time."""
    monkeypatch.setattr(owner, "_DYING_S", 0.5)


@contextmanager
def another_program(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another program own a folder."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "owns\n"
        try:
            yield program
        finally:
            program.kill()


def own(folder: Folder, on_wait: Callable[[], Any] = lambda: None) -> None:
    with owning(folder, on_wait):
        pass


def test_a_second_program_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    waits = list[int]()
    with another_program(tmp_path) as program:
        with pytest.raises(ValueError, match=f"process {program.pid} on .*another folder"):
            own(open_folder(tmp_path), lambda: waits.append(1))
        assert waits
        program.communicate("\n")
        own(open_folder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_death_of_the_owner_frees_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_DYING_S", 60.0)
    with another_program(tmp_path) as program:
        threading.Timer(0.5, program.send_signal, [signal.SIGKILL]).start()
        own(open_folder(tmp_path))
        assert program.wait(60) == -signal.SIGKILL


def test_a_program_may_own_a_folder_twice(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    with owning(folder):
        own(folder)
        assert json.loads(folder.read(FILE))["pid"] == os.getpid()
    assert not folder.has(FILE)


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with owning(open_folder(tmp_path)):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent has no folder any more
            os._exit(0)
    with another_program(tmp_path):
        pass
    os.close(writer)
    os.close(reader)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_folder_that_cannot_be_written_is_left_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    own(open_folder(tmp_path / "file"))


Places = Callable[[str], Folder]


@pytest.fixture(params=["s3", "subtree"])
def counted(request: pytest.FixtureRequest, place: Places, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder without locks, in which little time is a long one."""
    monkeypatch.setattr(owner, "_BEAT_S", 0.05)
    monkeypatch.setattr(owner, "_STALE_S", 0.4)
    return place(request.param)


def other(folder: Folder, count: int = 0, **more: Any) -> None:
    """Write what a program on another machine writes."""
    about = {"pid": 1, "host": "elsewhere", "machine": "another", "token": "other", "count": count, **more}
    folder.write(FILE, json.dumps(about).encode())


def test_a_counter_that_grows_refuses_a_second_program(counted: Folder) -> None:
    other(counted)
    counts = iter(range(1, 1000))
    with pytest.raises(ValueError, match="process 1 on elsewhere"):
        own(counted, lambda: other(counted, next(counts)))


def test_a_counter_that_stands_still_is_of_a_dead_program(counted: Folder) -> None:
    other(counted)
    with owning(counted):
        mine = json.loads(counted.read(FILE))
        assert mine["pid"] == os.getpid()
        while json.loads(counted.read(FILE))["count"] < 2:
            time.sleep(0.01)
    assert not counted.has(FILE)


def test_a_dead_program_of_this_machine_is_not_waited_for(counted: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_STALE_S", 1000.0)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    other(counted, pid=dead.pid, machine=home_of_processes())
    own(counted)
    other(counted, pid=os.getppid(), machine=home_of_processes())
    with pytest.raises(ValueError, match=str(os.getppid())):
        own(counted)


def test_who_was_taken_for_dead_leaves_the_folder_to_the_other(
    counted: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    with owning(counted):
        while "has taken over" not in caplog.text:
            other(counted)  # again, because this program may just have been writing
            time.sleep(0.01)
    assert json.loads(counted.read(FILE))["token"] == "other"


def test_a_disk_without_locks_has_a_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with owning(open_folder(tmp_path)):
        assert "count" in json.loads((tmp_path / FILE).read_text())
    assert not (tmp_path / FILE).exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("mine")
    (folder / FILE).symlink_to(elsewhere)
    own(open_folder(folder))
    assert elsewhere.read_text() == "mine"
