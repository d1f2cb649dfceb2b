"""Arms faults that happen when a worker reaches a trigger point, such as a training step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.exceptions import OnFailure, TrainerShutdownError
from raysgd.testing.targets import controller_of, group_of

_LATE_S = 60.0
_ANSWER_S = 30.0
_keys = itertools.count()


def send_itself(number: int) -> None:
    """Send this process a signal that kills or stops it, and wait for the signal to take effect."""
    os.kill(os.getpid(), number)
    time.sleep(_LATE_S)  # on a busy machine, the signal may take effect some time after `os.kill` returns


@dataclass
class Trap:
    """Causes a fault in a worker process when the process reaches a trigger point, such as its next training step.

    Attributes:
        act: Function that causes the fault.
        place: The trigger point: "step", "validate", "snapshot" or "continue".
        num_before: How many more times the process reaches the trigger point without a fault.
        once: True to cause the fault only once. False to cause it each time.
        key: Identifier of the trap, which is unique across processes.
        is_armed: True if the trap still causes a fault.
    """

    act: Callable[[], None]
    place: str
    num_before: int = 0
    once: bool = True
    key: str = field(default_factory=lambda: f"{os.getpid()}-{next(_keys)}")
    is_armed: bool = True

    def spring(self) -> None:
        """Cause the fault if the trap is armed. Called each time that the process reaches the trigger point.

        The first `num_before` calls do not cause the fault.
        """
        if not self.is_armed:
            return
        if self.num_before > 0:
            self.num_before -= 1
            return
        self.is_armed = not self.once
        self.act()

    def before(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Wrap the method `name` of `owner` so that each call to the method first calls `spring`.

        Args:
            owner: The object with the method.
            name: Name of the method.
            counts: Function of the method's arguments that returns False for calls that do not call `spring`.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def trapped(*args: Any, **keywords: Any) -> Any:
            if counts(*args, **keywords):
                self.spring()
            return original(*args, **keywords)

        setattr(owner, name, trapped)

    def before_each_step(self, hosted: Any) -> None:
        """Wrap the streams of batches so that `spring` is called before the user's training loop gets each batch.

        Keras's `fit` reads batches on its own schedule. With Keras, `spring` is called before each all-reduce of
        gradients instead.
        """
        streams: list[Any] = []  # the stream of the current call; empty until the call has created its stream

        def watched(stream: Any) -> Any:
            if stream not in streams:
                streams[:] = [stream]
                if hasattr(stream, "_begin_batch"):  # also called for each further micro-batch of a step
                    self.before(stream, "_begin_batch", lambda leg, item, *_: item.is_first)
                else:
                    self.before(stream, "before_exchange")
            return stream

        if hosted.feed.train_stream is not None:
            watched(hosted.feed.train_stream)
        original = hosted.loop.stream
        hosted.loop.stream = lambda *args, **options: watched(original(*args, **options))


_traps: list[Trap] = []  # all traps that were set in this process, including those that are no longer armed


def _set(replica: Any, trap: Trap) -> str | None:
    """Set a trap in this worker process. The worker may be training at the same time.

    Args:
        replica: The object that runs the user's code in this worker.
        trap: The trap to set.

    Returns:
        None, or an explanation if this type of replica never reaches the trap's trigger point.
    """
    needed = {"step": "_hosted", "validate": "operator", "snapshot": "capture", "continue": "regroup"}
    if not hasattr(replica, needed[trap.place]):
        return f"its `{type(replica).__name__}` has no `{needed[trap.place]}`"
    _traps.append(trap)
    if trap.place == "step":
        trap.before_each_step(replica._hosted)
    elif trap.place == "validate":
        trap.before(replica.operator, "validate")
    elif trap.place == "snapshot":
        trap.before(replica, "capture")
        if hasattr(replica, "_hosted"):
            trap.before(replica._copies, "inside_call")
    else:
        trap.before(replica, "regroup")
    return None


def _unset(replica: Any, key: str | None) -> None:
    for trap in _traps:
        trap.is_armed = trap.is_armed and key is not None and trap.key != key


def arm(trainer: Any, ranks: Sequence[int], trap: Trap) -> None:
    """Set a trap in the workers with these ranks, and wait until each worker confirms this.

    Raises:
        ValueError: The workers of this type of trainer never reach the trap's trigger point.
        RuntimeError: A worker has died or does not answer. The trap is not set in any worker.
    """
    with OnFailure(functools.partial(disarm_everywhere, trainer, trap.key)):
        reasons = group_of(trainer).ask_beside(_set, trap, ranks=ranks, timeout_s=_ANSWER_S)
        for rank in ranks:
            if rank not in reasons:
                raise RuntimeError(
                    f"`rank={rank}`: its worker has died or does not answer, and the trainer has not noticed yet. Make "
                    "a call first, such as `trainer.validate()`, which replaces the worker."
                )
            if reasons[rank] is not None:
                raise ValueError(f"`at={trap.place!r}` is not for this trainer: {reasons[rank]}.")


def disarm_everywhere(trainer: Any, key: str | None) -> None:
    """Disarm the trap with this key in all workers of a trainer. With `key=None`, disarm all traps in the workers.

    Do nothing if the trainer was shut down or has no workers at present.
    """
    with contextlib.suppress(TrainerShutdownError):
        controller = controller_of(trainer)
        controller.check_active()
        group = controller.group
        if group is not None:
            group.ask_beside(_unset, key)
