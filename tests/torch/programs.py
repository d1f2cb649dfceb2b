"""Programs that tests run in a process of their own, to see how they end and what they write."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240  # less than a test has
COLUMNS = 100

_PRELUDE = """
    import ray.cloudpickle
    from tests.torch import operators_for_tests

    ray.cloudpickle.register_pickle_by_value(operators_for_tests)  # workers have no path to the tests
"""


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with the output in pipes."""
    return subprocess.run(
        _command(program),
        timeout=TIMEOUT_S,
        env=_environment(),
        cwd=os.environ["TMPDIR"],
        capture_output=True,
        text=True,
    )


def run_in_terminal(program: str, interrupt_at: str = "") -> tuple[int, str]:
    """Run a program in a terminal; return its exit status and all that it wrote there.

    Args:
        program: The program.
        interrupt_at: Ctrl-C is pressed once this is to be seen.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        _command(program),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=_environment(),
        cwd=os.environ["TMPDIR"],
        start_new_session=True,
    )
    os.close(terminal)
    try:
        text = _read_all(controller, interrupt_at, lambda: process.send_signal(signal.SIGINT))
        return process.wait(TIMEOUT_S), text
    finally:
        os.close(controller)
        process.kill()
        process.wait()


def _read_all(controller: int, awaited: str, act: Callable[[], None]) -> str:
    """All that is written; `act` is called once, when `awaited` is to be seen."""
    text, is_due = b"", bool(awaited)
    while chunk := _read_some(controller):
        text += chunk
        if is_due and awaited.encode() in text:
            is_due = False
            act()
    return text.decode()


def _read_some(controller: int) -> bytes:
    try:
        return os.read(controller, 4096)
    except OSError as error:  # how a terminal says that nobody writes to it any more
        if error.errno != errno.EIO:
            raise
        return b""


def _command(program: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(_PRELUDE) + textwrap.dedent(program)]


def _environment() -> dict[str, str]:
    """This process's own, with the shared cluster's address where it is connected to one."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "SGD_PLACEMENT_GROUP_TIMEOUT_S": "120",
    }
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return environment
