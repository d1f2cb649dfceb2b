"""What tests ask about processes, and what they give to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object]) -> None:
    """Looks again and again until it is so, for no longer than a busy machine may take."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


@contextmanager
def shipped(*modules: ModuleType) -> Iterator[None]:
    """Lets workers use what these modules define, without a path to the tests."""
    import ray.cloudpickle

    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not just what is left of one that ended."""
    return _state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether a process stands still: a signal that stops it arrives some moments after it was sent."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while it was looked at
        return ""
