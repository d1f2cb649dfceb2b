"""What has happened in the running step of the optimizer (`StepRecord`), in its latest batch, and in the whole call.

A step is committed when the training code asks for the next batch, or ends. From then on, it is never undone, and a new
`StepRecord` begins. The record of an interrupted step remains until the step is undone.
"""

from __future__ import annotations

import copy
import math
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from raysgd.core.connections.torch import is_connection_error, is_group_broken, wait_for_collectives
from raysgd.trainer.messages.joint_work import JointWork

_NUM_MARKS = 32  # number of hashes to report, one per recent action; a rank further behind cannot be compared


class BatchRecord:
    """A record of what user code and the library have done with the latest batch.

    Args:
        number: Number of batches that the training code has requested in this worker group's part of the call.
        waits: True if the batch still needs a backward pass, and its weight matters.

    Attributes:
        number: See the argument; 0 before the first batch.
        waits: See the argument.
        had_backward: True if a backward pass was recorded.
        with_gradients: IDs of the optimizers that have gradients of this batch but have not stepped with them yet.
        skipped: IDs of the optimizers that must not step, because nothing counts in their gradients, or because a
            callback leaves the step out.
        is_left_out: True if a callback leaves the step out.
        items: For each call of the criterion, over how many labels or other items it averaged.
        uncounted: True if a loss ignored labels or weighted them unequally, and user code passed no weight. A tensor if
            the value is on a GPU.
        is_by_samples: True if a backward pass was weighted by the batch's number of samples.
        has_shared_metrics: True if the batch's last gradients were sent to the other ranks, and metrics with them.
        has_asked_to_step: With accumulation, True if `optimizer_step` was called for this batch.
    """

    def __init__(self, number: int = 0, waits: bool = False) -> None:
        self.number, self.waits = number, waits
        self.had_backward = self.is_by_samples = self.has_shared_metrics = self.has_asked_to_step = False
        self.is_left_out = False
        self.with_gradients: set[int] = set()
        self.skipped: set[int] = set()
        self.items: list[Any] = []
        self.uncounted: Any = False

    def leave_out(self) -> None:
        """Record that a callback leaves the step out."""
        self.is_left_out = True

    def ask_to_step(self) -> None:
        """Record that user code has called `optimizer_step`."""
        self.has_asked_to_step = True

    def forget_items(self) -> None:
        """Let the criterion's calls from now on count for the next metrics of the batch."""
        self.items = []


class Saved:
    """The state from before a step of the optimizer.

    Values of tensors are not in this object; `TensorCopies` has copies of them.

    Args:
        waiting: See the attribute.

    Attributes:
        waiting: Parameters that already had gradients when the step began, because no optimizer had stepped with these
            gradients yet.
        is_whole: True if all state was copied before the batch.
        has_unknown: True if state that the batch may change cannot be copied.
        restore: Functions that restore the state: objects, buffers, and the rest of what was copied.
    """

    def __init__(self, waiting: Sequence[torch.Tensor]) -> None:
        self.waiting = waiting
        self.is_whole = self.has_unknown = False
        self.restore: list[Callable[[], object]] = []


class StepRecord:
    """A record of what has happened on this rank since the last commit.

    Args:
        error: See the attribute.

    Attributes:
        error: The first exception of a lost connection in an all-reduce, even if user code has caught it. None if all
            connections are open, as far as is known.
        saved: The state from before the step; None if no batch has begun since the last commit.
        num_all_reduces: Number of all-reduces of gradients. If the gradients of one backward pass of a model are sent
            in several all-reduces, only the last one counts.
        is_averaged: True if an all-reduce came through, or still runs and will report a lost connection.
        stepped: IDs of the optimizers that have started to step.
        num_collectives: Number of collectives that had started in PyTorch's default process group when an optimizer
            last started to step. None if no optimizer has stepped, or if the number is not needed.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.saved: Saved | None = None
        self.num_all_reduces, self.is_averaged = 0, False
        self.stepped: set[int] = set()
        self.num_collectives: float | None = None
        self._awaited: float | None = None  # number of collectives that had started before the latest `wait`

    def note_saved(self, saved: Saved) -> None:
        """Record that the first batch of the step begins."""
        self.saved, self.num_all_reduces = saved, 0

    @contextmanager
    def noting_lost_connections(self, is_lost: Callable[[BaseException], bool] = is_connection_error) -> Iterator[None]:
        """Record the step's first connection error in the `with` block. Every exception is raised again."""
        try:
            yield
        except Exception as error:  # communication raises different classes of exceptions in each backend
            if is_lost(error):
                self.note_lost_connection(error)
            raise

    def note_lost_connection(self, error: BaseException) -> None:
        """Record that an all-reduce of the step failed because a connection was lost."""
        self.error = self.error or error

    def note_averaged(self) -> None:
        """Record that an all-reduce came through, or has started and will report a lost connection."""
        self.is_averaged = True

    def note_step(self, optimizer: Any, counts_collectives: bool = False) -> None:
        """Record that an optimizer starts to step."""
        self.stepped.add(id(optimizer))
        if counts_collectives and self.saved is not None:
            self.num_collectives = _num_collectives()

    def end_user_code(self) -> bool:
        """Return True if collectives have started since the last `note_step` that counts them, and stop counting."""
        number, self.num_collectives = self.num_collectives, None
        return number is not None and number != _num_collectives()

    def wait(self) -> None:
        """Wait until the gradients are exchanged, and raise if that failed. Called before they are used in a step.

        Do not wait again before another collective has started.
        """
        number = _num_collectives()
        if number != self._awaited:
            with self.noting_lost_connections():
                wait_for_collectives()
            self._awaited = number

    def check(self) -> None:
        """Raise if the step's gradients were not averaged, though user code may have caught the exception.

        If a rank was lost after the all-reduces of the step, its gradients are the mean over all ranks.

        Raises:
            Exception: The first connection error. Its class depends on the backend.
            DistNetworkError: No all-reduce came through in the step, and a connection to another rank has closed.
        """
        if self.error is not None:
            raise self.error
        if not self.is_averaged and is_group_broken():
            raise DistNetworkError("the connection to another rank ended, and user code went on with the next batch")

    def in_next_group(self) -> StepRecord:
        """Return the same record for the next worker group, which no connection error of this group concerns."""
        record = copy.copy(self)
        record.error = None
        return record


def _num_collectives() -> float:
    """Return how many collectives the library and user code have started in PyTorch's default group in this process.

    Return NaN if this version of PyTorch does not count them. NaN differs from itself, so a caller that compares two
    results finds that they differ.
    """
    # The type is Any, because PyTorch's type stubs lack the method that is called below.
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return 0 if group is None else getattr(group, "_get_sequence_number_for_group", lambda: math.nan)()


class FlightRecorder:
    """Records this rank's all-reduces and steps in one call, to find ranks that do something else.

    If a rank calls more or fewer collectives than the other ranks, its calls are matched with the wrong calls on those
    ranks, or its last call waits forever. Collectives detect this only if the tensors' sizes differ. Therefore, each
    rank sends this record in the heartbeats of a call and with the call's result, and the driver compares the records.
    Any thread may read it.

    Args:
        number: Number of the call in this worker group, the same on all ranks. 0 before the first call, and if the
            ranks may differ; nothing is recorded then.

    Attributes:
        number: Number of the call in this worker group.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._changing = threading.Lock()
        self._is_open, self._is_over = number > 0, False
        self._counts: Counter[str] = Counter()
        self._marks = deque([0], _NUM_MARKS)

    def note(self, what: str) -> None:
        """Record that this rank starts an action. All ranks must start the same actions in the same order.

        Args:
            what: Name of the action, such as "gradients were exchanged".
        """
        with self._changing:
            if self._is_open:
                self._counts[what] += 1
                self._marks.append(zlib.crc32(what.encode(), self._marks[-1]))

    @property
    def work(self) -> JointWork | None:
        """The recorded actions, in the form that is sent to the driver; None before the worker group's first call."""
        with self._changing:
            if not self.number:
                return None
            return JointWork(dict(self._counts), tuple(self._marks), self._is_over, self.number)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Record actions in the `with` block. If the block does not raise, mark the record as complete at its end."""
        try:
            yield
            self._is_over = True
        finally:
            self._is_open = False
