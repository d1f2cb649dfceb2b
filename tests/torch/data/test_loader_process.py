from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from raysgd.torch.data.sampling import ending_with_parent
from tests.helpers.processes import is_alive


def load_until_ended(said: str) -> None:
    ending_with_parent(lambda worker_id: Path(said).write_text(f"{os.getpid()} {worker_id}"))(3)
    time.sleep(300)


def have_it_load(said: str) -> None:
    multiprocessing.get_context("fork").Process(target=load_until_ended, args=(said,)).start()
    time.sleep(300)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


def test_a_process_that_loads_ends_with_the_killed_one_that_it_loads_for(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    parent = multiprocessing.get_context("spawn").Process(target=have_it_load, args=(str(said),))
    parent.start()
    wait_until(lambda: said.exists() and bool(said.read_text()))
    pid, worker_id = map(int, said.read_text().split())
    assert worker_id == 3, "what the user wants done first is done"
    assert is_alive(pid)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_until(lambda: not is_alive(pid))
