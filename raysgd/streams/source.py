"""The batches of one worker, pass by pass, and the positions that a state carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from raysgd._numbers.seeds import seed_of
from raysgd.streams.data import StreamData, check_same_shards
from raysgd.streams.joint_reader import JointReader, StreamBatch
from raysgd.streams.lane_ends import StartSum, alone
from raysgd.streams.lanes import LanePosition
from raysgd.streams.own_lanes import rows_of_worker
from raysgd.streams.stream_pass import StreamPass, StreamPosition

_NUM_POSITIONS = 64
_WHEN_TRAINED = 2


class StreamSource:
    """Opens passes over a stream.

    Args:
        data: The stream, and the place of the worker.
        seed: Decides the order of every pass; the same on all ranks.
        collate: Makes a batch of a list of rows.
        item: Makes what is yielded: of the batch, the weight of its gradient, its rows that count, those of all ranks,
            whether a joint step begins and ends with it, the seeds of a logical shard, and whether the pass ends.
        no_batch: Yielded in the place of a batch without rows.

    Attributes:
        start_sum: How ranks add up what they see of their lanes.
    """

    def __init__(
        self,
        data: StreamData,
        seed: int,
        collate: Callable[[list[Any]], Any],
        item: Callable[..., Any],
        no_batch: Any = None,
    ) -> None:
        self.data, self.seed = data, seed
        self._collate, self._item, self._no_batch = data.loader.collate or collate, item, no_batch
        self.start_sum: StartSum = alone
        self._positions: dict[int, StreamPosition] = {}
        self._opened_at = 0
        self._end = data.num_rows

    @property
    def most_batches(self) -> int:
        """How many batches a rank takes for a joint step, one after the other."""
        shares: Any = self.data.shares
        return int(shares.num_batches(self.data.batch_size))

    @property
    def num_shards(self) -> int:
        """How many logical shards a joint batch has; 0 where it is divided by ranks."""
        return getattr(self.data.shares, "num_shards", 0)

    @property
    def is_known(self) -> bool:
        """Whether the number of rows in each lane is known beforehand."""
        return self.data.open_pass(0, self.seed).is_known

    def open(self, pass_index: int, consumed: int) -> Iterator[Any]:
        """Start a pass after `consumed` rows."""
        data, of_pass = self.data, self.data.open_pass(pass_index, self.seed)
        self._opened_at, self._end = consumed, data.num_rows
        if not consumed:
            self._positions.clear()
        if not (data.is_training or of_pass.is_known):
            return self._own_items(of_pass)
        begin = self._positions.get(consumed, StreamPosition(consumed))
        assert not consumed or of_pass.is_known or begin.lanes is not None, "where lanes are came with the state"
        reader = JointReader(of_pass, data.shares, data.rank, begin, self.start_sum, data.is_training)
        return self._items(reader, pass_index, consumed)

    def _items(self, reader: JointReader, pass_index: int, consumed: int) -> Iterator[Any]:
        for batch in reader:
            if batch.is_first:
                self._note(batch)
            weight = batch.num_rows * self.data.world_size / batch.num_joint if batch.num_joint else 0.0
            own = self._collate(batch.rows) if batch.rows else self._no_batch
            seeds = self._seeds(pass_index, consumed, batch) if self.num_shards else None
            ends_pass = batch.is_last and batch.after.num_rows == self._end
            place = batch.is_first, batch.is_last, seeds, ends_pass
            yield self._item(own, weight, batch.num_rows, batch.num_joint, *place)
            if batch.is_last:
                consumed = batch.after.num_rows
        self._end = consumed

    def _own_items(self, of_pass: StreamPass) -> Iterator[Any]:
        """An evaluation where ranks would have to tell each other how many rows there are: each takes its own lanes."""
        rows, size = rows_of_worker(of_pass, self.data.rank, self.data.world_size), self.data.batch_size
        while own := list(islice(rows, -(-size // self.data.world_size))):
            yield self._item(self._collate(own), 1.0, len(own), len(own))

    def _seeds(self, pass_index: int, consumed: int, batch: StreamBatch) -> tuple[int, int]:
        """Seeds of a logical shard, which begins with its first row, and of what follows the last one."""
        places = (consumed + batch.start, consumed)
        own, of_step = (seed_of(self.seed, pass_index, at, _WHEN_TRAINED) for at in places)
        return own, of_step

    def _note(self, batch: StreamBatch) -> None:
        """Keep the position behind a joint batch. How many of these steps are done, the training says later."""
        num_rows = batch.after.num_rows
        self._positions[num_rows] = batch.after
        if len(self._positions) > _NUM_POSITIONS:
            del self._positions[next(iter(self._positions))]
        if batch.ends_pass:
            self._end = num_rows

    def num_steps(self) -> int | None:
        """Steps of the pass since it was opened, if known."""
        return None if self._end is None else -(-(self._end - self._opened_at) // self.data.batch_size)

    def consumed_after(self, num_steps: int) -> int:
        """Rows of the pass that all ranks have used after that many steps since it was opened."""
        rows = self._opened_at + num_steps * self.data.batch_size
        return rows if self._end is None else min(rows, self._end)

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a saved position says beside the number of rows."""
        position = self._positions.get(consumed, StreamPosition(consumed))
        signature = self.data.signature
        lengths = [shard.num_rows for shard in self.data.shards]
        lanes = None if position.lanes is None else [list(lane) for lane in position.lanes]
        shards = [signature.num_shards, signature.digest, None if None in lengths else lengths]
        return {"seed": self.seed, "shards": shards, "turn": position.turn, "lanes": lanes}

    def load_state(self, consumed: int, state: Mapping[str, Any]) -> None:
        """Take a position over.

        Raises:
            ValueError: It is one in other shards.
        """
        check_same_shards(state["shards"], self.data)
        lanes = None if state["lanes"] is None else tuple(LanePosition(*lane) for lane in state["lanes"])
        self.seed = state["seed"]
        self._positions = {consumed: StreamPosition(consumed, state["turn"], lanes)}
