"""The batches of one worker, pass by pass, and the positions that a state carries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

from raysgd._numbers.seeds import seed_of
from raysgd.streams.data import StreamData
from raysgd.streams.joint_reader import JointReader, StreamBatch
from raysgd.streams.lane_ends import StartSum, alone
from raysgd.streams.lanes import LanePosition, lanes_of
from raysgd.streams.loading.making import BatchLoader, BatchMaker, Collate, LoaderInThread, collated
from raysgd.streams.loading.processes import LoaderProcesses
from raysgd.streams.stream_pass import StreamPass, StreamPosition

logger = logging.getLogger(__name__)

_NUM_POSITIONS = 64
_WHEN_TRAINED = 2


class StreamGroup(Protocol):
    """The group of workers that read a stream together."""

    @property
    def rank(self) -> int:
        """The place of this worker."""

    @property
    def world_size(self) -> int:
        """The number of workers."""

    def adding(self) -> StartSum:
        """Return what adds up numbers over all workers; an error where they tell each other nothing."""


class StreamSource:
    """Opens passes over a stream.

    Args:
        data: The stream.
        ranks: The workers.
        seed: Decides the order of every pass; the same on all ranks.
        collate: Makes a batch of a list of rows.
        item: Makes what is yielded: of the batch, the weight of its gradient, its rows that count, those of all ranks,
            whether a joint step begins and ends with it, the seeds of a logical shard, and whether the pass ends.
        no_batch: Yielded in the place of a batch without rows.

    Attributes:
        left_out: Rows of the pass that could not be read, and were left out.
        row_bytes: The mean size of a row in memory, of those that this worker had so far; None before the first.
    """

    is_divided: ClassVar[bool] = True

    def __init__(
        self,
        data: StreamData,
        ranks: StreamGroup,
        seed: int,
        collate: Collate,
        item: Callable[..., Any],
        no_batch: Any = None,
    ) -> None:
        self.data, self.seed = data, seed
        self._ranks = ranks
        self._collate, self._item, self._no_batch = collate, item, no_batch
        self._start_sum: StartSum = alone
        self._positions: dict[int, StreamPosition] = {}
        self.left_out = 0
        self.row_bytes: float | None = None
        self._num_rows_seen = 0
        self._opened_at = 0
        self._end = data.num_rows

    @property
    def most_batches(self) -> int:
        """The number of batches that a rank takes for a joint step, one after the other."""
        shares: Any = self._shares
        return int(shares.num_batches(self.data.batch_size))

    @property
    def num_shards(self) -> int:
        """The number of logical shards of a joint batch; 0 where it is divided by ranks."""
        return getattr(self._shares, "num_shards", 0)

    @property
    def _shares(self) -> Any:
        return self.data.divide(self.data.batch_size, self._ranks.world_size)

    def join(self, ranks: StreamGroup) -> None:
        """Let ranks tell each other what they see of their lanes, where nothing else says it."""
        self._ranks = ranks
        is_needed = ranks.world_size > 1 and not self.data.open_pass(0, self.seed).is_known
        self._start_sum = ranks.adding() if is_needed else alone

    def open(self, pass_index: int, consumed: int) -> Iterator[Any]:
        """Start a pass after `consumed` rows."""
        data, of_pass = self.data, self.data.open_pass(pass_index, self.seed)
        self._opened_at, self._end = consumed, data.num_rows
        if not consumed:
            self._positions.clear()
        if not (data.is_training or of_pass.is_known):
            return self._own_items(replace(of_pass, stream=replace(of_pass.stream, drop_last=False)))
        begin = self._positions.get(consumed, StreamPosition(consumed))
        assert not consumed or of_pass.is_known or begin.lanes is not None, "where lanes are came with the state"
        watched = self._watched(of_pass)
        loading = partial(self._loading, of_pass, watched)
        ranks, pad = self._ranks, data.is_training
        reader = JointReader(of_pass, self._shares, ranks.rank, begin, watched, loading, self._start_sum, pad)
        return self._items(reader, pass_index, consumed)

    def _watched(self, of_pass: StreamPass) -> range:
        return lanes_of(self._ranks.rank, self._ranks.world_size, of_pass.num_lanes)

    def _loading(self, of_pass: StreamPass, watched: range) -> BatchLoader:
        loader, frameworks = self.data.loader, self._collate
        own, num = loader.collate, min(loader.num_workers, len(watched))
        if not num:
            return LoaderInThread(BatchMaker(of_pass, watched, own or frameworks))
        make: Callable[[list[Any]], Any] = own or frameworks
        join: Callable[[list[Any]], Any] = frameworks.join
        if own is not None:
            make, join = (own, _only) if num == 1 else (list, partial(_collated, own))
        lanes = [lanes_of(number, num, len(watched)) for number in range(num)]
        makers = [BatchMaker(of_pass, watched[each.start : each.stop], make) for each in lanes]
        return LoaderProcesses(makers, join, loader.prefetch, frameworks.begin_process)

    def _items(self, reader: JointReader, pass_index: int, consumed: int) -> Iterator[Any]:
        for batch in reader:
            if batch.is_first:
                self._note(batch)
            weight = batch.num_rows * self._ranks.world_size / batch.num_joint if batch.num_joint else 0.0
            own = self._no_batch if batch.batch is None else batch.batch
            self._measure(batch)
            seeds = self._seeds(pass_index, consumed, batch) if self.num_shards else None
            ends_pass = batch.is_last and batch.after.num_rows == self._end
            place = batch.is_first, batch.is_last, seeds, ends_pass
            yield self._item(own, weight, batch.num_rows, batch.num_joint, *place)
            if batch.is_last:
                consumed = batch.after.num_rows
        self._end = consumed
        if consumed and consumed == self._opened_at and not self._ranks.rank:
            logger.warning("epoch %d was to continue after %d rows, and has none left", pass_index + 1, consumed)

    def _own_items(self, of_pass: StreamPass) -> Iterator[Any]:
        """An evaluation where ranks would have to tell each other how many rows there are: each takes its own lanes."""
        size, watched = -(-self.data.batch_size // self._ranks.world_size), self._watched(of_pass)
        loading, shares = partial(self._loading, of_pass, watched), self.data.divide(size, 1)
        for batch in JointReader(of_pass, shares, 0, StreamPosition(), watched, loading, pad=False):
            yield self._item(batch.batch, 1.0, batch.num_rows, batch.num_rows)

    def _measure(self, batch: StreamBatch) -> None:
        """Take the size of a batch into the mean."""
        if batch.num_rows:
            before, self._num_rows_seen = self._num_rows_seen, self._num_rows_seen + batch.num_rows
            self.row_bytes = ((self.row_bytes or 0.0) * before + num_bytes(batch.batch)) / self._num_rows_seen

    def _seeds(self, pass_index: int, consumed: int, batch: StreamBatch) -> tuple[int, int]:
        """Seeds of a logical shard, which begins with its first row, and of what follows the last one."""
        places = (consumed + batch.start, consumed)
        own, of_step = (seed_of(self.seed, pass_index, at, _WHEN_TRAINED) for at in places)
        return own, of_step

    def _note(self, batch: StreamBatch) -> None:
        """Keep the position behind a joint batch. How many of these steps are done, the training says later."""
        num_rows = batch.after.num_rows
        self._positions[num_rows], self.left_out = batch.after, batch.after.left_out
        if len(self._positions) > _NUM_POSITIONS:
            del self._positions[next(iter(self._positions))]
        if batch.ends_pass:
            self._end = num_rows
            if self.left_out and not self._ranks.rank:
                logger.warning("%d rows could not be read and were left out of this pass", self.left_out)

    @property
    def num_samples(self) -> int | None:
        """Rows of the pass, of all ranks, if known."""
        return self._end

    def num_steps(self) -> int | None:
        """Steps of the pass since it was opened, if known."""
        return None if self._end is None else -(-(self._end - self._opened_at) // self.data.batch_size)

    def consumed_after(self, num_steps: int) -> int:
        """Rows of the pass that all ranks have used after that many steps since it was opened."""
        rows = self._opened_at + num_steps * self.data.batch_size
        return rows if self._end is None else min(rows, self._end)

    def state(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return what a saved position says beside the number of rows."""
        position = self._positions.get(consumed, StreamPosition(consumed))
        lanes = None if position.lanes is None else [list(lane) for lane in position.lanes]
        return {"seed": self.seed, "stream": self.data.origin, "turn": position.turn, "lanes": lanes}

    def load_state(self, position: Mapping[str, Any]) -> bool:
        """Take a saved position over; a pass that stopped there can go on.

        Raises:
            ValueError: It is one in the middle of a pass over another stream.
        """
        self.data.check_position(position)
        self.seed, self._positions = position["seed"], {}
        if position["is_mid_pass"]:
            consumed, lanes = position["consumed"], position["lanes"]
            places = None if lanes is None else tuple(LanePosition(*lane) for lane in lanes)
            self._positions[consumed] = StreamPosition(consumed, position["turn"], places)
        return True


def num_bytes(batch: Any) -> int:
    """Return the size of the arrays, tensors and texts in a batch."""
    if isinstance(batch, Mapping):
        return sum(map(num_bytes, batch.values()))
    if isinstance(batch, list | tuple):
        return sum(map(num_bytes, batch))
    return len(batch) if isinstance(batch, bytes | str) else int(getattr(batch, "nbytes", 0))


def _collated(collate: Callable[[list[Any]], Any], parts: list[list[Any]]) -> Any:
    rows = [row for rows in parts for row in rows]
    return collated(collate, rows, [f"row {number} of the batch" for number in range(len(rows))])


def _only(parts: list[Any]) -> Any:
    return parts[0]
