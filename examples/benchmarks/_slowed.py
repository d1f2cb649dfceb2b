"""Slows one process down to half a CPU: with a control group, or by stopping it half of the time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000
_STOPPED_S = 0.01


def way() -> str:
    """Return the method that works on this machine."""
    return "CPU quota of a cgroup" if _has_quota() else "SIGSTOP and SIGCONT in turn"


def _has_quota() -> bool:
    return os.access(_GROUPS, os.W_OK) and (_GROUPS / "cpu.cfs_quota_us").exists()


@contextlib.contextmanager
def half_as_fast(pid: int) -> Iterator[None]:
    """Give a process half of one CPU until the end of the block."""
    with _quota(pid) if _has_quota() else _stops(pid):
        yield


@contextlib.contextmanager
def _quota(pid: int) -> Iterator[None]:
    group = _GROUPS / f"raysgd-{pid}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(_PERIOD_US // 2))
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the process may be gone
            (_GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextlib.contextmanager
def _stops(pid: int) -> Iterator[None]:
    done = threading.Event()

    def alternate() -> None:
        while not done.wait(_STOPPED_S):
            os.kill(pid, signal.SIGSTOP)
            done.wait(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
