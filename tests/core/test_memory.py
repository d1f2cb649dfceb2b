"""Which memory a process keeps after it was freed, counted by the pages that the kernel had to provide."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raysgd.core import memory

ROOT = Path(__file__).resolve().parents[2]
IS_GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
needs_glibc = pytest.mark.skipif(not IS_GLIBC, reason="only glibc has these parameters")


def train_in_thread() -> int:
    """Allocate and free what a step might, many times in a thread; return the page faults after the first times."""
    faults = []

    def steps() -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        for _ in range(30):
            blocks = [ctypes.c_void_p(libc.malloc(size << 18)) for size in (1, 9, 30, 60, 90, 60, 30, 9, 1)]
            for block in blocks:
                libc.memset(block, 1, 1 << 18)
            for block in blocks:
                libc.free(block)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    return faults[-1] - faults[9]


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def freed_mib() -> tuple[int, int]:
    """Return how much memory freed blocks still hold, before and after it is returned."""
    before, found = resident_mib(), []

    def fill() -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        blocks = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(300)]
        for block in blocks:
            libc.memset(block, 1, 1 << 20)
        for block in blocks[:-1]:
            libc.free(block)
        found.append(resident_mib() - before)
        memory.return_freed_memory()
        found.append(resident_mib() - before)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return found[0], found[1]


def answer(program: str, **variables: str) -> list[int]:
    """Run lines in a process of their own, in which nothing has allocated before."""
    lines = f"from tests.core.test_memory import *\nfrom raysgd.core.memory import keep_freed_memory\n{program}"
    plain = {name: value for name, value in os.environ.items() if name not in memory.USERS_SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", lines], env={**plain, **variables}, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [int(word) for word in done.stdout.split()]


@needs_glibc
def test_steps_in_a_thread_reuse_their_memory() -> None:
    [kept] = answer("keep_freed_memory(); print(train_in_thread())")
    [plain] = answer("print(train_in_thread())")
    assert kept < 100
    assert plain > 1000


@needs_glibc
@pytest.mark.parametrize("name", memory.USERS_SETTINGS)
def test_what_the_user_configured_stays(name: str) -> None:
    value = "glibc.malloc.top_pad=0" if name == "GLIBC_TUNABLES" else "131072"
    [faults] = answer("keep_freed_memory(); print(train_in_thread())", **{name: value})
    assert faults > 1000


@needs_glibc
def test_memory_that_is_free_can_be_returned() -> None:
    held, left = answer("keep_freed_memory(); print(*freed_mib())")
    assert held >= 290
    assert left < 30


def test_without_glibc_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    for name in memory.USERS_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.DEBUG):
        memory.keep_freed_memory()
    memory.return_freed_memory()
    assert "no glibc" in caplog.text


KEEPS_AND_FREES = """
import sys
from pathlib import Path
import numpy as np
from raysgd.core.memory import return_large_blocks
if sys.argv[1] == "returns":
    return_large_blocks()
np.ones(4 << 20, np.uint8)  # from here on, the C library keeps what is not larger
pairs = [(np.ones(1 << 18, np.uint8), np.ones(1 << 12, np.uint8)) for _ in range(384)]
small = [pair[1] for pair in pairs]
del pairs
[kib] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
print(kib)
"""


def kib_in_the_end(how: str, **variables: str) -> int:
    """Of a process that frees 96 MiB in blocks, with something that stays behind each."""
    command, variables = [sys.executable, "-c", KEEPS_AND_FREES, how], {**os.environ, **variables}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout)


@needs_glibc
def test_large_blocks_are_returned_although_smaller_ones_behind_them_stay() -> None:
    assert kib_in_the_end("returns") + 80 * 1024 < kib_in_the_end("keeps")


@needs_glibc
def test_large_blocks_stay_if_the_user_configured_it() -> None:
    assert kib_in_the_end("returns", MALLOC_MMAP_THRESHOLD_=str(32 << 20)) > 80 * 1024
