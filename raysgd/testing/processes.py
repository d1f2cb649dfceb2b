"""Kills, freezes and slows down the worker processes of a trainer."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from raysgd.testing import in_driver
from raysgd.testing.targets import check_ranks, controller_of, group_of
from raysgd.testing.traps import Trap, arm, disarm_everywhere, send_itself

IN_WORKERS = ("validate", "snapshot", "continue")
"""Values of the argument `at` for faults that happen when the worker reaches a certain point, besides `step:N`.
`kill_worker` describes each value."""

IN_DRIVER = ("save", "load", "state_dict", "get_model", "setup")
"""Values of the argument `at` for faults that happen when the driver calls a method of the trainer or starts workers.
`kill_worker` describes each value."""

_STEP = re.compile(r"step:(\d+)")
_GONE_S = 30.0
_ANSWER_S = 5.0


def kill_worker(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Kill the process of one or more ranks with SIGKILL.

    Args:
        trainer: A running trainer with workers outside the driver.
        rank: The rank, or several ranks to kill together.
        at: When to kill the process. Unless `at` is "now", this function returns before the process is killed.

            * "now": immediately. This function returns when Ray has noticed that the process is gone.
            * "step:N": when the process starts training step N, where 0 is its next step.
            * "validate": when the process starts to validate.
            * "snapshot": when the process copies its training state for a snapshot. This happens after a call to the
              trainer, such as `train`, and with `snapshot_every_n_steps` also during the call.
            * "continue": when the process joins a new worker group after another rank was lost.
            * "setup": when the worker with this rank is set up the next time that all workers start.
            * "save", "load", "state_dict", "get_model": when the driver calls this method of the trainer. The process
              that has the rank at that moment is killed.

    Raises:
        ValueError: There is no such rank, `at` is invalid, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced. Or the fault must be armed
            in a worker, as for "step:N", and one of these ranks has died or does not answer.
    """
    _end_with(signal.SIGKILL, trainer, rank, at)


def hang_rank(trainer: Any, rank: int | Sequence[int], at: str = "now") -> None:
    """Stop the process of one or more ranks with SIGSTOP, as if its machine had frozen. The process never continues.

    During the next call to the trainer, such as `train`, the stopped process does not send heartbeats. After
    `heartbeat_s` seconds without a heartbeat, the trainer kills the process.

    Args:
        trainer: A running trainer with workers outside the driver.
        rank: The rank, or several ranks to stop together.
        at: When to stop the process. The values are the same as for `kill_worker`, except that "setup" is not allowed.
            With "now", this function sends the signal and returns without waiting for the process to stop.

    Raises:
        ValueError: There is no such rank, `at` is invalid, or the rank is the driver itself.
        RuntimeError: The trainer was shut down, or its workers are currently being replaced. Or the fault must be armed
            in a worker, as for "step:N", and one of these ranks has died or does not answer.
    """
    _end_with(signal.SIGSTOP, trainer, rank, at)


@contextlib.contextmanager
def slow_rank(trainer: Any, rank: int | Sequence[int], seconds: float) -> Iterator[None]:
    """Inside the ``with`` block, make the processes of one or more ranks sleep before each training step.

    Args:
        trainer: A running trainer.
        rank: The rank, or several ranks. With `use_local=True`, the rank in the driver's process is allowed, too.
        seconds: Number of seconds to sleep before each step.

    Raises:
        ValueError: The rank does not exist, or `seconds` is not a positive number.
        RuntimeError: The trainer was shut down, its workers are currently being replaced, or one of these ranks has
            died and the trainer has not noticed yet.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(f"`seconds={seconds!r}`: need a positive number of seconds to pause before each step.")
    ranks = check_ranks(trainer, rank, may_be_driver=True)
    trap = Trap(functools.partial(time.sleep, float(seconds)), "step", once=False)
    arm(trainer, ranks, trap)
    try:
        yield
    finally:
        disarm_everywhere(trainer, trap.key)


def disarm(trainer: Any) -> None:
    """Disarm all faults of a trainer that are armed but have not happened yet.

    Raises:
        TypeError: `trainer` is not a trainer.
    """
    controller_of(trainer)
    in_driver.disarm_all(trainer)
    disarm_everywhere(trainer, None)


def _end_with(number: signal.Signals, trainer: Any, rank: int | Sequence[int], at: str) -> None:
    step = _check_moment(at, allow_setup=number == signal.SIGKILL)
    ranks = check_ranks(trainer, rank, may_be_driver=False)
    if at == "now":
        _signal_now(trainer, ranks, number)
    elif at == "setup":
        in_driver.arm_setup(trainer, ranks)
    elif at in IN_DRIVER:
        in_driver.arm_call(trainer, at, functools.partial(_signal_soon, trainer, ranks, number))
    else:
        place, _, _ = at.partition(":")
        arm(trainer, ranks, Trap(functools.partial(send_itself, number), place, step or 0))


def _check_moment(at: str, allow_setup: bool) -> int | None:
    """Check the argument `at`, which says when a fault happens. Return N if `at` is "step:N", else None.

    Raises:
        ValueError: `at` has no allowed value. "setup" is allowed only if `allow_setup` is True.
    """
    names = [name for name in (*IN_WORKERS, *IN_DRIVER) if allow_setup or name != "setup"]
    if at == "now" or at in names:
        return None
    match = _STEP.fullmatch(at) if isinstance(at, str) else None
    if match is None:
        words = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f'`at={at!r}`: allowed are "now", "step:N" with a number N of 0 or more, {words}.')
    return int(match[1])


def _signal_now(trainer: Any, ranks: Sequence[int], number: int) -> None:
    group = group_of(trainer)
    calls = {rank: group.submit_beside(rank, _send_to_self, number) for rank in ranks}
    if number != signal.SIGKILL:
        return
    import ray

    _, deaf = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
    # A process that SIGSTOP has stopped cannot run `_send_to_self`, so Ray kills it.
    for rank in [rank for rank, call in calls.items() if call in deaf]:
        group.kill_rank(rank)
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=_GONE_S)


def _signal_soon(trainer: Any, ranks: Sequence[int], number: int) -> None:
    """Send a signal to the workers with these ranks, without waiting for its effect. Skip ranks that are gone."""
    group = group_of(trainer)
    for rank in ranks:
        if rank in group.remote_ranks:
            group.submit_beside(rank, _send_to_self, number)


def _send_to_self(replica: Any, number: int) -> None:
    os.kill(os.getpid(), number)
