"""Retries operations on remote storage that fail temporarily."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from raysgd.core.text.secrets import has_secret, masked
from raysgd.exceptions import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_VARIABLE = "RAYSGD_STORAGE_TIMEOUT_S"
DEFAULT_S = 60.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0

_LASTING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    StorageError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    NotImplementedError,
    AssertionError,
    MemoryError,
)
_LASTING_NUMBERS = {
    errno.EDQUOT,
    errno.EFBIG,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EROFS,
}


def may_pass(error: BaseException) -> bool:
    """Return True if an error may be temporary, in which case a retry may help.

    The result depends on the class of the exception and, for an `OSError`, on the error number. The message is ignored,
    because each store has its own messages.

    >>> may_pass(ConnectionResetError()), may_pass(PermissionError())
    (True, False)
    """
    if isinstance(error, _LASTING) or not isinstance(error, Exception):
        return False
    return not (isinstance(error, OSError) and error.errno in _LASTING_NUMBERS)


def retried(
    attempt: Callable[[], T],
    doing: str,
    total_s: float = DEFAULT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Perform an operation and return its result. If it fails temporarily, try again, with pauses that become longer.

    Args:
        attempt: Function that performs the operation once.
        doing: Description of the operation for the log, such as "read `s3://bucket/file`".
        total_s: Seconds, counted from the start of the first attempt, after which no further attempt is started.
        clock: Function that returns the time in seconds.
        sleep: Function that sleeps for a number of seconds.

    Raises:
        Exception: The error of the last attempt.
    """
    deadline, longest_s = clock() + total_s, _FIRST_PAUSE_S
    while True:
        pause_s = longest_s * random.uniform(0.75, 1.0)  # random, so that not all workers try again at the same time
        try:
            return attempt()
        except Exception as error:  # stores may raise any exception
            if not may_pass(error) or clock() + pause_s > deadline:
                raise
            logger.warning("could not %s, trying again in %.1f s: %s", doing, pause_s, in_short(error))
        sleep(pause_s)
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)


def limit_s() -> float:
    """Return the number of seconds for which failed operations on remote storage are retried.

    The environment variable `RAYSGD_STORAGE_TIMEOUT_S` sets this number. Default: 60.

    Raises:
        ValueError: The variable is not a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"`{TIMEOUT_VARIABLE}={text!r}`: need a number of seconds, 0 or more; 0 tries only once.")
    return seconds


def in_short(error: BaseException) -> str:
    """Return the first line of an error message, shortened and without secrets.

    If the error has no message, return the name of its class.
    """
    words = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return masked(words.strip().partition("\n")[0])[:500].rstrip(".") or type(error).__name__


def storage_error(doing: str, error: BaseException, advice: str) -> StorageError:
    """Return the `StorageError` that users get. Its message says what failed, why, and what to do.

    Args:
        doing: Description of the operation that failed, such as "read `s3://bucket/file`".
        error: The original error.
        advice: What the user can do. Ignored if the disk or the quota is full, or if a file is too large, because there
            is special advice for these errors.
    """
    storage_error = StorageError(f"could not {doing}: {in_short(error)}. {_ADVICE.get(_number(error), advice)}")
    storage_error.errno = _number(error)
    return storage_error


@contextlib.contextmanager
def telling(doing: str, advice: str) -> Iterator[None]:
    """Inside the block, convert errors of the operating system, except a `FileNotFoundError`, to a `StorageError`.

    The arguments are those of `storage_error`.
    """
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise storage_error(doing, error, advice) from error


def cause_of(error: BaseException) -> BaseException | None:
    """Return the original error of a store as the cause of a `StorageError`.

    Return None if the text of the error contains a secret, so that no traceback shows the secret.
    """
    return None if has_secret(str(error)) else error


def _number(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


_FULL = "Free some space there, or use another place."
_ADVICE: dict[int | None, str] = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL}
