"""`StepLoop`: the life of each batch, from its draw to the commit of its step. `StepParts`: the framework's part of it.

What is decided about a batch before user code sees it is its `BatchPlan`: the source of the data makes it, and the pure
generator `planned` combines global batches into steps of the optimizer.

A step is committed when the training loop requests the next batch, or ends. From then on, it is never undone, and its
batches are never repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.arrays.division import NO_BATCH, BatchPlan
from raysgd.core.numbers.meters import AverageMeterCollection
from raysgd.trainer.messages.comparison import JointWork
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.feed import DataCursor, DataFeed

_REDRAW_EVERY_S = 0.1


@dataclass(frozen=True)
class StepRules:
    """The rules for all steps of a call in one group of workers.

    Attributes:
        averages: True if gradients are averaged over the ranks.
        accumulate: Number of global batches in a step of the optimizer. The last step of a pass or a call may have
            fewer.
        micro_batches: Largest number of batches into which a rank splits its share of a global batch.
        num_shards: Number of logical shards of a global batch (`deterministic=True`); 0 without them.
        num_batches: Largest number of batches of one rank in a step.
        has_several: True if a step may have several batches of one rank.
        weighs: True if a step has several batches, of this rank or of several ranks, so that their weights matter.
    """

    averages: bool = False
    accumulate: int = 1
    micro_batches: int = 1
    num_shards: int = 0
    num_batches: int = field(init=False)
    has_several: bool = field(init=False)
    weighs: bool = field(init=False)

    def __post_init__(self) -> None:  # attributes, because each batch reads them several times
        object.__setattr__(self, "num_batches", self.accumulate * self.micro_batches)
        object.__setattr__(self, "has_several", self.num_batches > 1)
        object.__setattr__(self, "weighs", self.averages or self.has_several or self.num_shards > 0)

    @property
    def option(self) -> str:
        """The trainer's option that combines several batches into one step, for error messages."""
        return f"accumulate_grad_batches={self.accumulate}" if self.micro_batches == 1 else "micro_batch_size"

    def samples_in_step(self, plan: BatchPlan) -> int | None:
        """Return by how many samples a batch counts in a step of several batches. None if its step has no others."""
        if not self.has_several:
            return None
        return plan.total_samples if self.averages or plan.num_samples is None else plan.num_samples


def planned(
    drawn: Iterator[tuple[Any, BatchPlan, bool]], accumulate: int, num_batches: int | None
) -> Iterator[tuple[Any, BatchPlan]]:
    """Yield each drawn batch with its plan. A step ends after `accumulate` global batches, a pass, or the call.

    Args:
        drawn: Each batch, its plan as if its global batch was alone in its step, and whether the pass ends with it.
        accumulate: Number of global batches in a step of the optimizer.
        num_batches: Number of global batches of the call; None to go on as long as batches come.
    """
    num_started, num_complete, starts_step = 0, 0, True
    for batch, plan, ends_pass in drawn:
        num_started += plan.starts_global_batch
        num_complete += plan.ends_global_batch
        ends_call = num_started == num_batches and plan.ends_global_batch
        sync = plan.ends_global_batch and (ends_pass or ends_call or num_complete >= accumulate)
        if not (starts_step and sync):
            plan = plan._replace(starts_step=starts_step, ends_step=sync)
        yield batch, plan
        starts_step, num_complete = sync, 0 if sync else num_complete
        if ends_call:
            return


class StepParts:
    """Acts for a framework at the events of a step, in a training or validation call. Each framework has a subclass.

    This base class assumes that the training state is always that of a committed step.

    Args:
        feed: Provides the data.
        leg: See the property. None if the subclass finds it.

    Attributes:
        has_stock_loop: True if the library's own training loop runs the epoch, not one that the user wrote. The
            library's loop adds the number of samples and the logged metrics to the metrics of each batch itself.
    """

    has_stock_loop = False

    def __init__(self, feed: DataFeed, leg: Any = None) -> None:
        self._feed, self._leg = feed, leg

    @property
    def leg(self) -> Any:
        """The place where user code and hooks find the running step: PyTorch's `Leg`, or Keras's `TFStep`.

        Its `rules` hold for all steps, and its `plan` says how the current batch counts. Its `skip` leaves the batch
        out, and its `end_data` says that no batch follows.
        """
        return self._leg

    # ------------------------------------------------------------------------------------ from batch to batch

    def check_start(self) -> None:
        """Called before the first batch of every call and every pass, to check that training can start."""

    def open(self, plan: BatchPlan, batch: Any) -> None:
        """Prepare for a batch, which is about to be handed out.

        Args:
            plan: How the batch counts.
            batch: The batch.

        Raises:
            Exception: A rank was lost, or the batch cannot follow the one before. The step has not started then.
        """
        self.leg.begin_batch(plan)

    def takes_padding(self, batch: Any) -> bool:
        """Take part in the collectives of a step in which only other ranks have samples, instead of user code.

        Return False if user code must train on the padding batch.
        """
        return False

    def remember_metrics(self) -> Callable[[], None]:
        """Return a function that restores the metric objects of now, so that they do not count a padding batch."""
        return lambda: None

    def commit(self) -> None:
        """Commit the step that has ended.

        Raises:
            Exception: The group of workers broke during the step, or the step is invalid.
        """

    def note_committed(self) -> None:
        """Record that the current state is that after a committed step. Called outside of steps."""

    def undo_step(self) -> None:
        """Bring back the training state after the last committed step. The batches since then will be repeated."""

    @property
    def can_be_source(self) -> bool:
        """True if the training state is that of a committed step, or if `undo_step` can bring it back."""
        return True

    def can_undo_now(self, error: BaseException, is_alone: bool) -> bool:
        """Return True if `undo_step` can be called after an error, on all ranks alike, before the call raises it.

        Return False if workers cannot communicate anymore, for example because one was lost. Recovery follows then.

        Args:
            error: The error.
            is_alone: True if there is one worker.
        """
        return self.can_be_source

    def check_memory(self, error: BaseException) -> None:
        """After an error, raise `StepLacksMemory` if memory ran out in a step that the ranks can repeat."""

    def may_be_parted(self, error: BaseException) -> bool:
        """Return True if an error may have been raised because ranks ran different collective operations."""
        return False

    @property
    def joint_work(self) -> JointWork | None:
        """Record of this rank's actions in the call, such as all-reduces, that all ranks must take in the same order.

        None if such actions are not recorded.
        """
        return None

    # ------------------------------------------------------------------------------------ around a call

    def training(self, hosted: Any, call: Any, loop: StepLoop) -> AbstractContextManager[Any]:
        """Return the context manager in which to run the operator's `train_epoch`.

        Args:
            hosted: The `HostedOperator`.
            call: The `TrainingCall`.
            loop: The steps of the call.
        """
        raise NotImplementedError

    def begin_call(self) -> None:
        """Called before a new training call, to discard what this object remembers about the previous call."""

    def finish(self, has_batches: bool) -> None:
        """Called when `train_epoch` has returned, before its last step is committed.

        Args:
            has_batches: True if this worker group has drawn batches in the call.
        """

    def end_call(self) -> None:
        """Called when the worker has completed its answer to a training call."""
        self.note_committed()

    def note_loaded(self) -> None:
        """Called after another training state was loaded, which is always the state after a committed step."""
        self.note_committed()

    def plain(self, value: Any) -> Any:
        """Convert a metric to a type that the driver can read. A one-element tensor, for example, becomes a number."""
        return value

    def num_samples(self, meters: AverageMeterCollection) -> int:
        """Return the number of samples that this rank used in a training call, or 0 if samples are not counted."""
        return int(meters.n)

    def results(self, meters: AverageMeterCollection) -> Any:
        """Return this rank's metrics of an epoch that another rank has finished and this rank has not."""
        return meters.summary()

    def extra_results(self) -> dict[str, Any]:
        """Return the entries that the library adds to the result of a training call, such as the epoch number."""
        return {"epoch": self._feed.epoch}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        """Return the keyword arguments with which to call the operator's `validate`, besides the batches and `info`."""
        return {}


class StepLoop:
    """The steps of one call on this worker. All that happens to a batch happens in `batches`, in this order.

    Args:
        cursor: Draws the batches, and knows the position in the data.
        parts: What the framework does at the events of a step.
        num_batches: Number of global batches, from as many passes as needed. None for the rest of the current pass, or
            for a whole new pass if the last one is complete.
        committed: Function that is called after each committed step, with True after the last one. If it raises an
            exception, the iteration ends.
        redraw: Function that updates a progress display. It is called at most ten times a second.

    Attributes:
        committed: See the argument.
    """

    def __init__(
        self,
        cursor: DataCursor,
        parts: StepParts,
        num_batches: int | None,
        committed: Callable[[bool], None] = lambda is_last: None,
        redraw: Callable[[], None] | None = None,
    ) -> None:
        self.cursor, self.parts = cursor, parts
        self._num_batches, self.committed, self._redraw = num_batches, committed, redraw
        self._restore_metrics: Callable[[], None] | None = None

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches. Requesting the next batch commits the step of the batch before."""
        cursor, parts, num_batches, redraw, due = self.cursor, self.parts, self._num_batches, self._redraw, 0.0
        accumulate = parts.leg.rules.accumulate
        drawn = cursor.drawn(parts.check_start, num_batches is None, accumulate > 1) if num_batches != 0 else iter(())
        for batch, plan in planned(drawn, accumulate, num_batches):
            parts.open(plan, batch)
            has_batch = batch is not NO_BATCH
            cursor.opened(plan, has_batch)
            if not has_batch:
                continue
            if not (plan.is_padding and parts.takes_padding(batch)):
                if plan.is_padding:
                    self._restore_metrics = parts.remember_metrics()
                if redraw is not None and time.monotonic() >= due:
                    redraw()
                    due = time.monotonic() + _REDRAW_EVERY_S
                # User code runs the forward pass, the backward pass with its all-reduces, and the step of the
                # optimizer. What happens is recorded in `parts.leg`.
                yield batch
                if plan.is_padding:
                    self.leave_padding()
            if plan.ends_step:
                self.commit()
        parts.leg.end_data()

    def commit(self, is_last: bool = False) -> None:
        """Commit the step that has ended.

        Args:
            is_last: True if the training loop has ended. Its last step may be committed already, or incomplete.

        Raises:
            Exception: The group of workers broke during the step, the step is invalid, or the call pauses here.
        """
        if self._restore_metrics is not None:
            self.leave_padding()
        if self.cursor.num_batches_open:
            self.parts.commit()
        else:
            self.parts.note_committed()
        self.cursor.commit()
        self.committed(is_last)

    def leave_padding(self) -> None:
        """Undo what a padding batch has changed in metric objects. Called after the batch, however it ended."""
        if self._restore_metrics is not None:
            restore, self._restore_metrics = self._restore_metrics, None
            restore()


class Batches:
    """The iterator over batches that is passed to the operator's `train_epoch`.

    Attributes:
        was_touched: True after the first use. If it stays False, the user's `train_epoch` has used other data.
    """

    def __init__(self, batches: Iterator[Any], loop: StepLoop) -> None:
        self._batches, self._loop = batches, loop
        self.was_touched = False

    @property
    def is_padding(self) -> bool:
        """True if the most recent batch is padding.

        A padding batch repeats samples, because this worker has no samples left while other workers have some.
        """
        plan: BatchPlan = self._loop.parts.leg.plan
        return plan.is_padding

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)
