"""Runs pytest and leaves nothing behind: `python -m tests.run ARGUMENTS OF PYTEST`, as `make test` does.

All processes that the tests start are children of this one, also those whose parents have died, and all files are in
one folder. At the end, also after Ctrl-C or the death of a test process, both are removed. The folder of a run that
failed is kept, for a look.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 30
"""How long pytest may take to stop after Ctrl-C, and processes to end after pytest."""


def main(arguments: list[str]) -> int:
    """Run pytest to its end, and return its exit status."""
    become_parent_of_orphans()
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray puts sockets into it, whose paths have a limit
    command = [sys.executable, "-m", "pytest", f"--basetemp={folder / 'pytest'}", *arguments]
    tests = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})

    def interrupt(number: int, _: Any) -> None:
        """Give pytest time to stop by itself."""
        signal.alarm(PATIENCE_S)
        if number != signal.SIGINT:  # which the terminal has sent to pytest, too
            tests.send_signal(signal.SIGINT)

    signal.signal(signal.SIGALRM, lambda *_: tests.kill())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    status = status_of(tests.pid)
    signal.alarm(0)
    left = end_all_children(time.monotonic() + PATIENCE_S * (status in (0, 1)))
    if left:
        print(f"ended {len(left)} processes that the tests left: {', '.join(sorted(left))}", file=sys.stderr)
    if status == 1:
        print(f"the files of the tests that failed are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def become_parent_of_orphans() -> None:
    """Let this process get the children of descendants that die, instead of the first process of the system."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def status_of(pid: int) -> int:
    """Wait for a child, and return its exit status. Others that end meanwhile do not stay as zombies."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def end_all_children(deadline: float) -> list[str]:
    """Wait until no process is left, and from the deadline on kill those that are; return their names."""
    left = {}
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            for child in children:
                left[child.pid] = command_of(child)
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        while any_has_ended():
            pass
        time.sleep(0.05)
    return list(left.values())


def any_has_ended() -> bool:
    """Return whether a child has ended that no one has asked for."""
    try:
        return os.waitpid(-1, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return False


def command_of(process: psutil.Process) -> str:
    """Return how a process was started, as far as it still says so."""
    try:
        return " ".join(process.cmdline())[:80] or process.name()
    except psutil.ZombieProcess:
        return process.name()
    except psutil.NoSuchProcess:
        return "one that has just ended"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
