"""Memory of a process: whether an error says that it ran out, and whether freed memory is reused or returned.

Each training step allocates and frees the same tensors, so workers should reuse their memory. Workers train in a
thread other than the main thread. For such threads, glibc returns freed memory at once. The operating system must then
provide and clear thousands of pages in each step. This can take a tenth of the time of a step (ADR 171). Importing this
module changes nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache

logger = logging.getLogger(__name__)

USERS_SETTINGS = ("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables with which users configure glibc. If one is set, `keep_freed_memory` does nothing."""

# Numbers of the parameters in glibc's `malloc.h`, and their new values. A thread's memory consists of heaps of 64 MiB.
# glibc keeps an empty heap if the padding is at least that large. Setting one parameter also stops glibc from raising
# the mmap threshold, the block size from which it maps each block separately. So set the maximum that it would choose.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_M_TRIM_THRESHOLD: 512 << 20, _M_TOP_PAD: 64 << 20, _M_MMAP_THRESHOLD: 32 << 20}
_LARGE_BYTES = 2**17  # minimum size of a large block: one worker's shard of a 1 MiB parameter on eight workers


def ran_out(error: BaseException | None, type_name: str = "", message: str = "") -> bool:
    """Return True if an exception says that the memory of a GPU or of the host ran out.

    Args:
        error: The exception. None if it could not be sent to this process.
        type_name: Name of the exception's class, if there is no `error`.
        message: Message of the exception, if there is no `error`.
    """
    names = {type_name} if error is None else {each.__name__ for each in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}:  # of Python, PyTorch and TensorFlow
        return True
    text = message if error is None else str(error)
    return "RuntimeError" in names and ("out of memory" in text or "DefaultCPUAllocator" in text)


def keep_freed_memory() -> None:
    """Let this process reuse the memory that its threads free.

    The process's memory grows to the most that any step needs, and then stays at that size. If this process does not
    use glibc, or if the user has set any of the variables in `USERS_SETTINGS`, this function does nothing.
    """
    _set(_SETTINGS)


@cache
def return_large_blocks() -> None:
    """Make this process return freed memory blocks of at least 128 KiB to the system immediately.

    Otherwise, the C library keeps freed blocks for reuse. If long-lived small allocations are placed in such a block,
    the rest of the block is too small for the next large request. The process then uses more and more memory. If
    `keep_freed_memory` was called before, it still applies to smaller blocks. If the user has set any of the variables
    in `USERS_SETTINGS`, this function does nothing.
    """
    _set({_M_MMAP_THRESHOLD: _LARGE_BYTES})


def _set(settings: Mapping[int, int]) -> None:
    chosen = [name for name in USERS_SETTINGS if name in os.environ]
    mallopt = _of_glibc("mallopt")
    if chosen or mallopt is None:
        logger.debug("freed memory is left to the allocator: %s", f"{chosen[0]} is set" if chosen else "no glibc")
        return
    for parameter, value in settings.items():
        mallopt(parameter, value)


def return_freed_memory() -> None:
    """Return freed memory to the operating system, for example after a large model was read and moved away."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or None if this process does not use glibc."""
    library = ctypes.CDLL(None)
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
