"""Deaths of workers at chosen moments: a file with the number of the process says when.

`install` lets a worker look for its file whenever a call or a new group begins. From there on it counts the functions
of the library that it enters, and dies in one of them. So it can die at every place of a call's beginning, and each
place where another rank waits for it comes up.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import raysgd
from raysgd.core.engine.worker import WorkerProcess

_LIBRARY = str(Path(raysgd.__file__).parent)
_ENTRANCES = ("leave_for_another", "join")  # of a connection, when a group is left and another one is joined
_folder: Path | None = None  # of this process


def install(folder: str) -> None:
    """Let this process look for its file in a folder."""
    global _folder
    is_first, _folder = _folder is None, Path(folder)
    if is_first and "ray" in sys.modules:
        WorkerProcess.on_replica = _watched(WorkerProcess.on_replica)  # type: ignore[method-assign]


def _watched(on_replica: Any) -> Any:
    """Count from the beginning of each call on, and of each change of the group."""

    @functools.wraps(on_replica)
    def watched(process: Any, *args: Any) -> Any:
        connection = type(process._connection)
        for name in _ENTRANCES:
            method = getattr(connection, name)
            if not hasattr(method, "__wrapped__"):
                setattr(connection, name, _counted(method))
        return _counted(on_replica)(process, *args)

    return watched


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **keywords: Any) -> Any:
        begin()
        return function(*args, **keywords)

    return counted


def begin() -> None:
    """Count from here on, if that was asked for."""
    order = _order()
    if order[:1] == ["call"] and sys.getprofile() is None:
        sys.setprofile(_countdown(int(order[1])))


def _countdown(num_functions: int) -> Any:
    num_left = num_functions

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal num_left
        if event != "call" or not frame.f_code.co_filename.startswith(_LIBRARY):
            return
        num_left -= 1
        if num_left <= 0:
            sys.setprofile(None)
            if _order():
                _die()

    return count


def at(place: str) -> None:
    """Die here if that was asked for: in the user's code, which calls this."""
    order = _order()
    if order[:2] != ["hook", place]:
        return
    if int(order[2]) <= 1:
        _die()
    _file().write_text(f"hook {place} {int(order[2]) - 1}")


def _file() -> Path:
    assert _folder is not None
    return _folder / str(os.getpid())


def _order() -> list[str]:
    if _folder is None:
        return []
    try:
        return _file().read_text().split()
    except FileNotFoundError:
        return []


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(folder: Path, pid: int, order: str) -> None:
    """In the driver: let a process die so."""
    file = folder / f"{pid}.new"
    file.write_text(order)
    file.rename(folder / str(pid))  # so that it is never seen half


def disarm(folder: Path) -> None:
    """In the driver: let no one die who has not yet."""
    for file in folder.iterdir():
        file.unlink()


def lives(pid: int) -> bool:
    """Return whether there is such a process, which is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second one where it ends while it is read
        return False


def end(pid: int) -> None:
    """Kill a process and wait until it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while lives(pid):
        time.sleep(0.001)
