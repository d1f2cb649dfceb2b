"""The connections that a process which a worker forks does not keep.

Ray notices that a worker was killed when its connection to the worker ends, and a forked process keeps that open. While
such a process lived, the loss was seen only after the worker had been silent for `heartbeat_s`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

_FOLDER = "/dev/fd"
_RAYLET = "/raylet"  # the name of its socket ends with it


def let_go_of_ray() -> None:
    """Let processes that this one forks from now on give up its connection to Ray, which they have no use for."""
    numbers = [number for number in map(int, os.listdir(_FOLDER)) if _leads_to_ray(number)]
    os.register_at_fork(after_in_child=lambda: _let_go(numbers))


def _leads_to_ray(number: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        return connection.family == socket.AF_UNIX and str(connection.getpeername()).endswith(_RAYLET)
    return False


def _let_go(numbers: Sequence[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(nowhere, number, inheritable=False)  # nothing else gets the number, by which Ray's code still knows it
    os.close(nowhere)
