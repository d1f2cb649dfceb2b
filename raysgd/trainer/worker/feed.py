"""The data of one worker across calls: cursors, the number of passes over the data, and the position.

Snapshots and checkpoints store the position, so that training can continue there.

`DataCursor` draws the batches. It keeps an iterator over its data open between calls, so a call with `num_steps`
continues where the previous call stopped. The position is the number of samples that all ranks together have used. It
is therefore valid for any number of workers. A pass is one iteration through the whole data, and may span several
calls.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd.core.arrays.division import NO_BATCH, BatchPlan, PlannedBatch
from raysgd.core.arrays.user_data import CallData, RayLoader
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.trainer.messages.epochs import EpochRequest

logger = logging.getLogger(__name__)


class DataCursor:
    """Draws the batches of a source, pass after pass over the data, and remembers the position in the data.

    Args:
        source: Object that supplies the batches, such as a wrapped data loader.
        next_pass: Function that is called when a new pass starts, and returns the index of the pass.
        has_one_pass: True if the source can be iterated through only once, by all ranks together. No second pass is
            then started.
        looks_ahead: True to always draw the next batch early, to learn whether a pass ends, where a batch does not say
            so.

    Attributes:
        pass_index: Index of the most recently started pass.
        num_batches_taken: Number of global batches that were started, including those without samples of this rank.
        num_batches_open: Number of global batches that were started since the last committed step.
        consumed: Number of samples of the current pass that all ranks together have used, with those of the step in
            progress. 0 if unknown.
        completed: The same number without the step in progress.
    """

    def __init__(
        self, source: Any, next_pass: Callable[[], int], has_one_pass: bool = False, looks_ahead: bool = False
    ) -> None:
        self.source = source
        self._next_pass, self._has_one_pass, self._has_begun = next_pass, has_one_pass, False
        self._looks_ahead = looks_ahead
        self._items: Iterator[PlannedBatch] | None = None  # batches of the open pass that were not drawn yet
        self._ahead: list[PlannedBatch | None] = []  # batches that were drawn but not yielded yet; None ends the pass
        self._is_moved = False  # True if the next pass to open is the rest of one, behind `consumed`
        self._ends_pass = False  # True if the pass ends with the batch that was drawn last
        self._used_after = 0  # of the batch that was drawn last
        self.pass_index = self.num_batches_taken = self.num_batches_open = self.consumed = self.completed = 0

    @property
    def num_batches_completed(self) -> int:
        """Number of global batches whose steps are committed."""
        return self.num_batches_taken - self.num_batches_open

    @property
    def is_mid_pass(self) -> bool:
        """True if the most recently started pass has batches left, or its last step is not committed yet."""
        return self._items is not None or self._is_moved or self.num_batches_open > 0

    def opened(self, plan: BatchPlan, has_batch: bool) -> None:
        """Record that the batch that was drawn last is about to be handed out.

        Args:
            plan: How the batch counts.
            has_batch: False if this rank has no samples in the step.
        """
        self.consumed = self._used_after
        self.num_batches_taken += plan.starts_global_batch
        self.num_batches_open += plan.starts_global_batch and has_batch
        if not self.num_batches_open:
            self.completed = self.consumed
        if self._ends_pass:
            self._items = None  # the next call starts a new pass

    def commit(self) -> None:
        """Record that the last step is done. Its batches will not be drawn again."""
        self.num_batches_open, self.completed = 0, self.consumed

    def samples_used(self) -> SamplesUsed | None:
        """Return how many samples of the pass all ranks together have used, or None if this is unknown.

        Another thread may call this method during training.
        """
        if not has_divided_source(self):
            return None
        completed = self.completed
        in_flight = max(0, self.consumed - completed) if self.num_batches_open else 0
        source = self.source
        return SamplesUsed(self.pass_index, source.num_samples, completed, in_flight, left_out=source.left_out)

    def break_off(self) -> None:
        """Discard an interrupted step. The batches of the step will be drawn again, possibly on another rank."""
        if self.is_mid_pass:
            self.resume(self.pass_index, self.completed)
        self.num_batches_taken = self.num_batches_completed
        self._items, self.num_batches_open = None, 0

    def resume(self, pass_index: int, consumed: int) -> None:
        """Let the next batch come from the given position in a pass.

        Args:
            pass_index: Index of the pass.
            consumed: Number of samples at the start of the pass that were used already.
        """
        self._items, self.pass_index, self._is_moved = None, pass_index, True
        self.consumed = self.completed = consumed

    def drawn(
        self, check: Callable[[], None], is_one_pass: bool, looks_ahead: bool = False
    ) -> Iterator[tuple[Any, BatchPlan, bool]]:
        """Yield batches, pass after pass, with their plans, and whether the pass ends: False where that is unknown.

        An empty source ends the iteration.

        Args:
            check: Function that is called before the first batch of the call and of every pass.
            is_one_pass: True to stop after the current pass, or after a whole new pass if the last one is complete.
            looks_ahead: True to draw the next batch early, to learn whether a pass ends, where a batch does not say so.
        """
        num_begun, just_opened = 0, False
        if self._items is not None:
            check()
        while True:
            if self._items is None:
                if is_one_pass and num_begun:
                    return
                self._items, self._ahead, just_opened = self._open(check), [], True
            if not self._ahead:
                self._ahead.append(next(self._items, None))
            coming = self._ahead[0]  # keep it in `_ahead` until it is yielded: drawing the next one may fail
            if coming is None:
                self._items = None
                if just_opened:
                    return
                continue
            just_opened, (batch, plan, is_last, self._used_after) = False, coming
            is_unknown = is_last is None and (looks_ahead or self._looks_ahead)
            self._ahead = [next(self._items, None)] if is_unknown else []
            self._ends_pass = self._ahead[0] is None if is_unknown else bool(is_last)
            num_begun += plan.starts_global_batch
            yield batch, plan, self._ends_pass

    def _open(self, check: Callable[[], None]) -> Iterator[PlannedBatch]:
        if self._has_one_pass and self._has_begun:
            return iter(())
        self._has_begun = True
        check()
        if not self._is_moved:
            self.pass_index, self.consumed = self._next_pass(), 0
        self._is_moved, self.completed = False, self.consumed
        return iter(self.source.open(self.pass_index, self.consumed))


class DataFeed(ABC):
    """Provides one worker's cursors, and remembers the position in each.

    Subclasses create the sources of batches. The attribute `is_divided` of a source is True if the library divides its
    data over the workers. Positions in such data are valid for any number of workers. A source's method
    `state(consumed, is_mid_pass)` returns those entries of a position that only the source has, such as the order of
    the samples. Its method `load_state(position)` restores a position, and returns True if the interrupted pass can
    continue from there. Its attribute `num_samples` is the number of samples that the pass will use, or None if this is
    unknown until the pass ends, and `left_out` the number of rows that could not be read.

    Attributes:
        epoch: Number of passes over the training data that have started.
        train_cursor: Cursor of the registered training data. None until a call has trained on this data.
        data_of_call: The data that the user passed to the last call, or this worker's shard of that data, under "train"
            or "validation".
        made_of_call: What `_make` created from each entry of `data_of_call`. Several calls on the same data use it.
        largest_batch: Number of samples that this worker processes at once, found by `micro_batch_size="auto"`. None
            before memory ran out.
        looks_ahead: True if cursors draw batches early. See `DataCursor`.
    """

    largest_batch: int | None = None
    looks_ahead = False

    def __init__(self) -> None:
        self.epoch = 0
        self.train_cursor: Any = None
        self.data_of_call: dict[str, CallData] = {}
        self._left_to_validate: Any = None  # the cursor that the next call to `validate` continues
        self._to_resume: Mapping[str, Any] | None = None
        self._call_cursor: Any = None  # of the training data that the user passed to a call
        self.made_of_call: dict[str, Any] = {}

    @property
    @abstractmethod
    def _ranks(self) -> Any:
        """This worker's rank and the number of workers, in the form that the framework's sources accept."""

    @property
    @abstractmethod
    def _registered_stream(self) -> Any:
        """The `StreamData` that the operator registered to train on. None if it has registered no data of this type."""

    @abstractmethod
    def _source(self, name: str, request: EpochRequest, *, training: bool) -> Any:
        """Return the source of batches for the data that the user passed to this call, or else for the registered data.

        Args:
            name: "train" or "validation".
            request: The driver's request.
            training: Whether the batches are used for training.
        """

    @abstractmethod
    def _make(self, name: str, share: CallData) -> Any:
        """Create a loader or dataset from the data that the user passed to a call.

        Args:
            name: "train" or "validation".
            share: The data, or this worker's shard.
        """

    def _open_validation(self, request: EpochRequest) -> Any:
        """Return a cursor of the validation data, from the first batch on."""
        is_of_call = request.shard_key is not None
        source = self._source("validation", request, training=False)
        has_one_pass = (is_of_call or self.ray_loader("validation") is not None) and not source.is_divided
        return DataCursor(source, lambda: 0, has_one_pass, self.looks_ahead)

    @abstractmethod
    def obstacle(self, name: str) -> str | None:
        """Return the reason why the position in the registered data is unknown, or None if it is known.

        Args:
            name: "train" or "validation".
        """

    def obstacle_of_call(self, cursor: Any) -> str | None:
        """Return the reason why a call cannot resume partway through the data that was passed to it.

        Return None if the call can resume, or if it uses registered data.
        """
        return None

    def samples_used(self) -> SamplesUsed | None:
        """Return the record of which training samples were used, or None if this is unknown.

        Both the training thread and the worker's second thread call this method.
        """
        cursor = self.train_cursor
        return None if cursor is None else cursor.samples_used()

    @abstractmethod
    def ray_loader(self, name: str) -> RayLoader | None:
        """Return the registered loader of training or validation data if it reads Ray Data. Otherwise, return None.

        Args:
            name: "train" or "validation".
        """

    def take_share(self, name: str, request: EpochRequest, share: CallData | None) -> None:
        """Store data that the driver has sent to this worker, in place of earlier data.

        The driver sends data that the user passed to the call: all of it, or this worker's shard. Of registered data,
        the driver only sends shards of Ray Data.

        Args:
            name: "train" or "validation".
            request: The driver's request.
            share: The data. None to keep the earlier data.
        """
        if share is None:
            return
        if request.shard_key is not None:
            self.made_of_call.pop(name, None)  # before the new data is made, which may be as large
            if name == "train":
                self._call_cursor = None
            self.made_of_call[name], self.data_of_call[name] = self._make(name, share), share
            return
        loader = self.ray_loader(name)
        assert loader is not None, "the driver divides what is registered"
        loader.iterator = share.data.iterator
        if name == "train":
            self.train_cursor = None

    def training(self, request: EpochRequest, *, is_begun: bool = False) -> Any:
        """Return the cursor for a training call.

        The batches come from the data that the user passed to the call. Without such data, they come from the data that
        the operator registered.

        Args:
            request: The driver's request to train.
            is_begun: Whether the call was interrupted and now continues. If the user passed data to the call, the pass
                over this data is then already counted.
        """
        if request.largest_batch is not None and request.largest_batch != self.largest_batch:
            self.limit_batches(request.largest_batch)
        epoch = self.epoch
        try:
            if request.shard_key is not None:
                self.epoch += not is_begun
                cursor = self._cursor_of_call(request)
            elif self.train_cursor is None:
                cursor = DataCursor(
                    self._source("train", request, training=True), self.count_pass, looks_ahead=self.looks_ahead
                )
                self._resume(cursor)
                self.train_cursor, self._to_resume = cursor, None
            else:
                cursor = self.train_cursor
            cursor.source.join(self._ranks)
        except BaseException:  # also on Ctrl-C: a call that cannot start counts no pass
            self.epoch = epoch
            raise
        return cursor

    @contextmanager
    def validating(self, request: EpochRequest) -> Iterator[Any]:
        """Inside the block, provide the cursor for a call to `validate`.

        After a successful call with `num_steps` on registered data, the next call on this data continues after the last
        batch, unless its request sets `starts_over`. After a failed call, or a call without `num_steps`, the next call
        starts with the first batch, wherever the user's loop has stopped. A call on data that the user passed always
        starts with the first batch.
        """
        if request.shard_key is not None:  # the user passed data to this call
            yield self._open_validation(request)
            return
        left, self._left_to_validate = self._left_to_validate, None
        cursor = self._open_validation(request) if left is None or request.starts_over else left
        yield cursor
        if request.num_steps is not None:
            self._left_to_validate = cursor

    def limit_batches(self, size: int) -> None:
        """From now on, process at most `size` samples at once. Called between two steps, on all ranks."""
        self.largest_batch = size

    def _cursor_of_call(self, request: EpochRequest) -> Any:
        """Return a cursor over the data that the user passed to a call.

        If an earlier call on the same data stopped before the end, the cursor continues from there.
        """
        if self._call_cursor is None:
            source = self._source("train", request, training=True)
            cursor = DataCursor(source, lambda: self.epoch - 1, looks_ahead=self.looks_ahead)
            share = self.data_of_call["train"]
            _go_to(cursor, share.place)
            self.data_of_call["train"], self._call_cursor = replace(share, place=None), cursor
        return self._call_cursor

    def is_divided(self, cursor: Any) -> bool:
        """Return True if a cursor reads the registered data, and the library divides that data over the workers.

        The position in the cursor is then valid for any number of workers. A subclass may also return True for a cursor
        over data that the user passed to a call.
        """
        return cursor is self.train_cursor and has_divided_source(cursor)

    def break_off(self) -> None:
        """In each training cursor, discard an interrupted step, so that the batches of this step are yielded again."""
        for cursor in (self.train_cursor, self._call_cursor):
            if cursor is not None:
                cursor.break_off()

    @property
    def order_obstacle(self) -> str | None:
        """Reason why this worker cannot use the remaining samples of the pass in the same order as before.

        None if it can.
        """
        return None

    def progress_text(self) -> str:
        """Return a text for the log about the repeated samples of an interrupted call. Empty if these are unknown."""
        data = self.samples_used()
        return "" if data is None else f"no sample lost, {data.in_flight} in flight are repeated ({data})"

    def resume_call(self, request: EpochRequest, share: CallData | None, place: Mapping[str, Any] | None) -> None:
        """Prepare the data for a training call that continues in a new group of workers.

        If the call trains on registered data, this method has no effect.

        Args:
            request: The driver's request to train.
            share: The data that the user passed to the call, or this worker's new shard of that data. None to keep the
                earlier data.
            place: The position in the data that the user passed to the call, from which the call continues.
        """
        if request.shard_key is not None:
            self.take_share("train", request, share)
            self.data_of_call["train"] = replace(self.data_of_call["train"], place=place)

    def place_of_call(self, cursor: Any) -> dict[str, Any] | None:
        """Return the position at which a call stopped in the data that the user passed to it.

        Return None at the end of a pass, for registered data, or if the position is unknown.
        """
        is_known = cursor is not self.train_cursor and has_divided_source(cursor) and cursor.is_mid_pass
        return _position_of(cursor) if is_known else None

    def count_pass(self) -> int:
        """Count a new pass over the training data, and return the index of the pass."""
        self.epoch += 1
        return self.epoch - 1

    def pass_index(self, cursor: Any) -> int:
        """Return the index of the pass over the data to which the next batch of this cursor belongs."""
        if cursor is not self.train_cursor:
            return self.epoch - 1
        index: int = cursor.pass_index if cursor.is_mid_pass else self.epoch
        return index

    def position(self) -> dict[str, Any] | None:
        """Return the position of the next batch in the training data, for snapshots and checkpoints.

        If the library does not divide the data over the workers, the position inside a pass is unknown, and the dict
        says so under "is_unknown". Return None between two passes over such data, and before the first pass.
        """
        cursor = self.train_cursor
        if cursor is None:
            return dict(self._to_resume) if self._to_resume else None
        if not self.is_divided(cursor):
            return {"is_unknown": True, "pass_index": cursor.pass_index} if cursor.is_mid_pass else None
        return _position_of(cursor)

    def check_position(self, position: Mapping[str, Any] | None) -> None:
        """If the operator has registered a `StreamData`, check that training can continue at a saved position in it.

        Raises:
            ValueError: The position is invalid for the registered stream.
        """
        if self._registered_stream is not None and position and position.get("is_mid_pass"):
            self._registered_stream.position(position)

    def go_to(self, epoch: int, position: Mapping[str, Any] | None) -> None:
        """Let the next call continue from a saved position, with new streams.

        Args:
            epoch: Number of passes over the training data that had started when the position was saved.
            position: The saved position, or None to start with a new pass.
        """
        self.close()
        self.epoch, self._to_resume = epoch, position

    def close(self) -> None:
        """Discard the cursors and their iterators over data."""
        self.train_cursor = None
        self._call_cursor = self._left_to_validate = None

    def _resume(self, cursor: Any) -> None:
        position = self._to_resume
        if position and position.get("is_unknown"):
            logger.warning(
                "epoch %s stopped in the middle, and the library does not shard this train data, so the position is "
                "unknown; reading the data from the beginning",
                position["pass_index"],
            )
        else:
            _go_to(cursor, position)


def _position_of(cursor: DataCursor) -> dict[str, Any]:
    """Return the position of a cursor in divided data."""
    is_mid_pass = cursor.is_mid_pass
    consumed = cursor.completed if is_mid_pass else 0
    return {
        "pass_index": cursor.pass_index,
        "consumed": consumed,
        "is_mid_pass": is_mid_pass,  # True when the pass has started, even before its first step is completed
        **cursor.source.state(consumed, is_mid_pass),
    }


def _go_to(cursor: DataCursor, position: Mapping[str, Any] | None) -> None:
    """Move a new cursor to a saved position, if there is a position and it is known what it means for this data."""
    if position and has_divided_source(cursor) and cursor.source.load_state(position) and position["is_mid_pass"]:
        cursor.resume(position["pass_index"], position["consumed"])


def has_divided_source(cursor: Any) -> bool:
    """Return True if the library divides the data of this cursor over the workers."""
    return getattr(getattr(cursor, "source", None), "is_divided", False)


def in_lockstep(
    batches: Iterator[Any], ask: Callable[[Any], Callable[[], Any]], data: str
) -> Iterator[tuple[Any, bool, Any]]:
    """Yield this rank's batches. Then repeat the last batch until all ranks have run out of batches.

    Otherwise, ranks that have more batches than others would wait forever in a collective.

    Args:
        batches: This rank's batches.
        ask: Function that starts to ask the other ranks about the next step. Its argument is this rank's next batch, or
            `NO_BATCH`. It returns a function that waits for the answer, which is false if no rank has a batch.
        data: What the batches come from, for errors.

    Yields:
        The batch, True if it is not a repetition, and the answer of the ranks.

    Raises:
        ValueError: This rank has no batch at all while other ranks have batches.
    """
    last, coming = NO_BATCH, next(batches, NO_BATCH)
    hear = ask(coming)
    while answer := hear():
        is_own = coming is not NO_BATCH
        last = coming if is_own else last
        if last is NO_BATCH:
            raise ValueError(
                f"The train {data} of this rank is empty while other ranks have data, so it has no batch to step with. "
                "Give every rank at least one batch."
            )
        coming = next(batches, NO_BATCH) if is_own else NO_BATCH
        hear = ask(coming)  # now, so that the ranks answer while this step is computed
        yield last, is_own, answer
