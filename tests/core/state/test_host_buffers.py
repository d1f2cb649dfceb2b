from __future__ import annotations

import platform
import subprocess
import sys

import pytest

KEEPS_AND_FREES = """
import sys
from pathlib import Path
import numpy as np
from raysgd.core.state.host_buffers import return_large_blocks
if sys.argv[1] == "returns":
    return_large_blocks()
np.ones(4 << 20, np.uint8)  # from here on, the C library keeps what is not larger
pairs = [(np.ones(1 << 18, np.uint8), np.ones(1 << 12, np.uint8)) for _ in range(384)]
small = [pair[1] for pair in pairs]
del pairs
[kib] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
print(kib)
"""


def kib_in_the_end(how: str) -> int:
    """Of a process that frees 96 MiB in blocks, with something that stays behind each."""
    command = [sys.executable, "-c", KEEPS_AND_FREES, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about the GNU C library")
def test_large_blocks_are_returned_although_smaller_ones_behind_them_stay() -> None:
    assert kib_in_the_end("returns") + 80 * 1024 < kib_in_the_end("keeps")
