"""A stream as the source of a worker's batches: opens passes over the stream, and saves and restores positions."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from typing import Any, ClassVar, Protocol, TypeAlias

from raysgd.core.arguments import is_integer
from raysgd.core.arrays.division import NO_BATCH, BatchPlan, Division, PlannedBatch, with_seeds
from raysgd.streams.global_reader import GlobalBatch, GlobalReader, StartSum, alone
from raysgd.streams.lanes import ENDLESS, NUM_LANES, LanePosition, StreamPass, StreamPosition, lanes_of, numbered_rows
from raysgd.streams.loaders import BatchLoader, BatchMaker, Collate, LoaderProcesses, collated
from raysgd.streams.stream import DROPPED, FAILED, Pipeline, RowSteps, Shard, Stream, check_shards

Divide: TypeAlias = Callable[[int, int], Division]
"""Function that takes the global batch size and the number of workers, and returns an object that splits batches."""
_NUM_POSITIONS = 64


@dataclass(frozen=True)
class StreamData:
    """A stream that an operator has registered, or that the user has passed to a call. All workers read it together.

    Attributes:
        loader: The stream, with its batch size and other options.
        shards: The shards of the stream.
        divide: Function that returns an object that splits global batches among workers.
        is_training: True if the stream is used for training. A worker without rows in a global batch then gets repeated
            rows as padding.
    """

    loader: Pipeline
    shards: Sequence[Shard]
    divide: Divide
    is_training: bool

    @property
    def batch_size(self) -> int:
        """Number of rows in a global batch, which all workers use together in a step."""
        assert self.loader.batch_size is not None, "checked when the stream was registered"
        return self.loader.batch_size

    @property
    def num_rows(self) -> int | None:
        """Number of rows in all global batches of a pass, or None if it is unknown."""
        num_rows = self.loader.num_rows(self.shards)
        if num_rows is None or not self.loader.drop_last:
            return num_rows
        return num_rows - num_rows % self.batch_size

    @cached_property
    def digest(self) -> str:
        """Hash of the names, lengths and versions of the shards."""
        text = "\n".join(f"{shard.name}\t{shard.num_rows}\t{shard.version}" for shard in self.shards)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def signature(self) -> str:
        """Description of the shards and the batch size, which must be the same on all ranks."""
        return f"{len(self.shards)} shards {self.digest} in global batches of {self.batch_size}"

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The settings that determine the rows of the stream and their order, as plain data.

        A saved position is only valid for a stream with the same origin.
        """
        loader = self.loader
        return {
            "buffer and seed of `shuffle`": [loader.buffer, loader.seed],
            "number of filters": sum(step.is_filter for step in loader.steps),
            "`on_error`": "skip" if loader.skips else "raise",
            "number of shards": len(self.shards),
            "digest of names, lengths and versions of shards": self.digest,
        }

    def position(self, position: Mapping[str, Any]) -> StreamPosition:
        """Return a saved position in the middle of a pass, after a check that it is valid for this stream.

        Raises:
            ValueError: The position was saved for a stream with another `origin` or for data that is not a stream, or
                it is damaged.
        """
        then, now = position.get("stream"), self.origin
        if not isinstance(then, Mapping) or then.keys() != now.keys():
            raise _misfit("data that is not a stream, or with another version of raysgd")
        differing = [f"{name} {then[name]!r}, now {value!r}" for name, value in now.items() if then[name] != value]
        if differing:
            raise _misfit(f"other data ({'; '.join(differing)})")
        lanes, turn, num_parts = position["lanes"], position["turn"], -(-len(self.shards) // NUM_LANES)
        end = self.loader.num_rows(self.shards) or self.loader.limit
        needs_lanes = bool(position["consumed"]) and not self.open_pass(0, 0).is_known
        if (
            not (is_integer(turn) and 0 <= turn < NUM_LANES)
            or position["consumed"] > (ENDLESS if end is None else end)
            or (needs_lanes if lanes is None else not isinstance(lanes, list | tuple) or len(lanes) != NUM_LANES)
            or not all(_is_place(lane, num_parts) for lane in lanes or ())
        ):
            raise ValueError("The state does not match, so nothing was loaded: its position in the stream is damaged.")
        places = None if lanes is None else tuple(LanePosition(*lane) for lane in lanes)
        return StreamPosition(position["consumed"], turn, places)

    def open_pass(self, pass_index: int, seed: int) -> StreamPass:
        """Return a pass over the stream, with this index and this seed for shuffling."""
        return StreamPass(self.loader, self.shards, pass_index, seed)


def stream_data(stream: Stream, name: str, divide: Divide, world_size: int) -> StreamData:
    """Check a stream for training or validation, and return it together with its list of shards.

    Args:
        stream: The stream.
        name: What the stream is for, "train" or "validation".
        divide: Function that returns an object that splits global batches among workers.
        world_size: Number of workers.

    Raises:
        TypeError: `shards()` returned an object that is not a `Shard` with a string as its name.
        ValueError: The stream has no batch size, its list of shards is invalid, or there are more workers than lanes.
            Or the stream is for validation and limited by `take`, and its number of rows is unknown.
    """
    stream = check_batched(stream, f"the {name} stream")
    if world_size > NUM_LANES:
        raise ValueError(
            f"{world_size} workers for a stream, which has {NUM_LANES} lanes: at most one worker per lane."
        )
    data = StreamData(stream, check_shards(stream), divide, name == "train")
    if name != "train" and stream.limit is not None and data.num_rows is None:
        raise ValueError(
            f"the {name} stream has a `take` and no known length: in an evaluation, each worker reads its own rows, so "
            "no worker knows when all have taken enough. Remove `take`, or set `num_rows` of the shards."
        )
    return data


def check_batched(stream: Stream, what: str) -> Pipeline:
    """Check that a stream has a batch size, and return the stream.

    Args:
        stream: The stream.
        what: Description of the stream, for the error message.

    Raises:
        ValueError: The stream has no batch size.
    """
    if not isinstance(stream, Pipeline) or stream.batch_size is None:
        raise ValueError(
            f"{what} has no batch size: end it with `.batch(size)`, the number of rows that all workers take together "
            "in a step."
        )
    return stream


def check_stream_of_call(stream: Stream, name: str, obstacle: str | None) -> None:
    """Check a stream that the user has passed to a method of a trainer.

    Args:
        stream: The stream.
        name: Name of the user's argument.
        obstacle: Reason why the trainer cannot use streams, or None if it can.

    Raises:
        ValueError: The trainer cannot use streams, or the stream has no batch size.
    """
    if obstacle is not None:
        raise ValueError(f"`{name}=` got {obstacle}")
    check_batched(stream, f"the stream in `{name}=`")


def _is_place(lane: Any, num_parts: int) -> bool:
    are_counts = isinstance(lane, list | tuple) and all(is_integer(each) and 0 <= each < ENDLESS for each in lane)
    return are_counts and len(lane) == len(LanePosition._fields) and lane[0] <= num_parts


def _misfit(what: str) -> ValueError:
    return ValueError(
        f"the state was saved in the middle of an epoch over {what}. Its position counts rows, so it needs the same "
        "stream and the same version. To start a new epoch instead, load the state without its position, with "
        '`load(path, parts=["models", "optimizers"])` of a `TorchTrainer`.'
    )


logger = logging.getLogger(__name__)


class StreamGroup(Protocol):
    """Interface of objects that describe the group of workers that read a stream together."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    def adding(self) -> StartSum:
        """Return a function that starts to sum numbers over all ranks.

        Raise an error if the workers cannot communicate.
        """


class StreamSource:
    """Opens passes over a stream in one worker, and remembers positions in the current pass.

    Args:
        data: The stream.
        ranks: The group of workers that read the stream together.
        seed: Seed for the order of rows in every pass. It must be the same on all ranks.
        collate: Combines a list of rows into a batch.
        convert: Function that gets each batch and its number of rows without padding, and returns the batch to yield.

    Attributes:
        left_out: Number of rows of the pass so far, on all ranks together, that were skipped because of errors.
    """

    is_divided: ClassVar[bool] = True

    def __init__(
        self,
        data: StreamData,
        ranks: StreamGroup,
        seed: int,
        collate: Collate,
        convert: Callable[[Any, int], Any] = lambda batch, num_rows: batch,
    ) -> None:
        self.data, self.seed = data, seed
        self._ranks = ranks
        self._collate, self._convert = collate, convert
        self._start_sum: StartSum = alone
        self._positions: dict[int, StreamPosition] = {}
        self.left_out = 0
        self._opened_at = 0
        self._end = data.num_rows

    @property
    def most_batches(self) -> int:
        """Number of batches that a rank processes one after the other in a step of all ranks."""
        return self._shares.num_batches(self.data.batch_size)

    @property
    def num_shards(self) -> int:
        """Number of shards into which each global batch is split with `deterministic=True`. Otherwise 0."""
        return self._shares.num_shards

    @property
    def _shares(self) -> Division:
        return self.data.divide(self.data.batch_size, self._ranks.world_size)

    def join(self, ranks: StreamGroup) -> None:
        """Read the stream together with a new group of workers from now on.

        If it is unknown how many rows the lanes of the stream have, the workers exchange how many rows they find.
        """
        self._ranks = ranks
        is_needed = ranks.world_size > 1 and not self.data.open_pass(0, self.seed).is_known
        self._start_sum = ranks.adding() if is_needed else alone

    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        """Return an iterator over the batches of a pass.

        Args:
            pass_index: Index of the pass.
            consumed: Number of rows at the start of the pass to leave out, because they were used already. Not used
                in an evaluation on a stream of unknown length.
        """
        data, of_pass = self.data, self.data.open_pass(pass_index, self.seed)
        self._opened_at, self._end = consumed, data.num_rows
        if not consumed:
            self._positions.clear()
        if not (data.is_training or of_pass.is_known):
            return self._own_batches(replace(of_pass, stream=replace(of_pass.stream, drop_last=False)))
        begin = self._positions.get(consumed, StreamPosition(consumed))
        assert not consumed or of_pass.is_known or begin.lanes is not None, "where lanes are came with the state"
        return self._batches(of_pass, begin)

    def _loading(self, of_pass: StreamPass) -> BatchLoader:
        """Return what makes the worker's batches."""
        watched = lanes_of(self._ranks.rank, self._ranks.world_size, of_pass.num_lanes)
        loader, frameworks = self.data.loader, self._collate
        own, num = loader.collate, min(loader.num_workers, len(watched))
        if not num:
            return BatchMaker(of_pass, watched, own or frameworks)
        make: Callable[[list[Any]], Any] = own or frameworks
        join: Callable[[list[Any]], Any] = frameworks.join
        if own is not None:
            make, join = (own, itemgetter(0)) if num == 1 else (list, partial(_collated, own))
        lanes = [lanes_of(number, num, len(watched)) for number in range(num)]
        makers = [BatchMaker(of_pass, watched[each.start : each.stop], make) for each in lanes]
        return LoaderProcesses(makers, join, loader.prefetch, frameworks.begin_process)

    def _batches(self, of_pass: StreamPass, begin: StreamPosition) -> Iterator[PlannedBatch]:
        ranks, consumed = self._ranks, begin.num_rows
        sums, pad = self._start_sum, self.data.is_training
        for whole, batches in GlobalReader(of_pass, self._shares, ranks.rank, begin, self._loading(of_pass), sums, pad):
            self._note(whole)
            for batch, (start, _, plan) in zip(batches, whole.parts, strict=True):
                if self.num_shards:
                    plan = with_seeds(plan, self.seed, of_pass.pass_index, consumed, start)
                yield self._planned(batch, plan, whole, whole.ends_pass and plan.ends_global_batch)
            consumed = whole.after.num_rows
        self._end = consumed
        if consumed and consumed == self._opened_at and not self._ranks.rank:
            number = of_pass.pass_index + 1
            logger.warning("epoch %d should continue after %d rows, but no rows are left", number, consumed)

    def _planned(self, batch: Any, plan: BatchPlan, whole: GlobalBatch, ends_pass: bool | None = None) -> PlannedBatch:
        own = NO_BATCH if batch is None else self._convert(batch, plan.num_samples or 0)
        return PlannedBatch(own, plan, ends_pass, whole.after.num_rows)

    def _own_batches(self, of_pass: StreamPass) -> Iterator[PlannedBatch]:
        """Yield the batches of an evaluation on a stream of unknown length. Each rank reads some lanes by itself."""
        shares = self.data.divide(-(-self.data.batch_size // self._ranks.world_size), 1)
        for whole, batches in GlobalReader(of_pass, shares, 0, StreamPosition(), self._loading(of_pass), pad=False):
            for batch, (_, _, plan) in zip(batches, whole.parts, strict=True):
                yield self._planned(batch, plan, whole)

    def _note(self, whole: GlobalBatch) -> None:
        """Remember the position after a global batch, so that the pass can continue there after a failure."""
        num_rows = whole.after.num_rows
        self._positions[num_rows], self.left_out = whole.after, whole.after.left_out
        if len(self._positions) > _NUM_POSITIONS:
            del self._positions[next(iter(self._positions))]
        if whole.ends_pass:
            self._end = num_rows
            if self.left_out and not self._ranks.rank:
                logger.warning("%d rows could not be read and were skipped in this pass", self.left_out)

    def layout(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return plain data for the journal of a run, from which `raysgd.replay` can find the rows of each step.

        Args:
            consumed: Number of rows of the pass that were used so far.
            is_mid_pass: Whether the position is inside a pass.
        """
        return {"kind": "stream", "batch_size": self.data.batch_size, **self.state(consumed, is_mid_pass)}

    @property
    def num_samples(self) -> int | None:
        """Number of rows in the pass, on all ranks together, or None if it is unknown."""
        return self._end

    def num_steps(self) -> int | None:
        """Return the number of steps from where the pass was opened to the end of the pass, or None if unknown."""
        return None if self._end is None else -(-(self._end - self._opened_at) // self.data.batch_size)

    def state(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return the entries of a saved position that are specific to streams, such as the position in each lane.

        Args:
            consumed: Number of rows of the pass that were used so far.
            is_mid_pass: Whether the position is inside a pass.
        """
        position = self._positions.get(consumed, StreamPosition(consumed))
        lanes = None if position.lanes is None else [list(lane) for lane in position.lanes]
        return {"seed": self.seed, "stream": self.data.origin, "turn": position.turn, "lanes": lanes}

    def load_state(self, position: Mapping[str, Any]) -> bool:
        """Restore a saved position. Always return True, because a pass over a stream can continue from any position.

        Raises:
            ValueError: The position is in the middle of a pass over a different stream, or it is damaged.
        """
        positions = {position["consumed"]: self.data.position(position)} if position["is_mid_pass"] else {}
        self.seed, self._positions = position["seed"], positions
        return True


def _collated(collate: Callable[[list[Any]], Any], parts: list[list[Any]]) -> Any:
    rows = [row for rows in parts for row in rows]
    return collated(collate, rows, [f"row {number} of the batch" for number in range(len(rows))])


class BatchesInOrder:
    """Iterates over the rows of a stream in their order, in batches, for predictions.

    The option `drop_last` of the stream is ignored, so that each row gets a prediction. By default, `on_error` is
    ignored, too, so that a row without a prediction raises an error. `take` limits the number of rows.

    Args:
        stream: The stream.
        size: Function that takes the batch size of the stream, or None, and returns the batch size to use.
        collate: Function that combines a list of rows into a batch. Not used if the stream has its own function.
        skips: Whether to skip rows that cannot be read, or for which a step fails.

    Attributes:
        num_batches: Number of batches, or None if it is unknown.

    Raises:
        TypeError: `shards()` returned an object that is not a `Shard` with a string as its name.
        ValueError: The stream is shuffled, or its list of shards is invalid.
    """

    def __init__(
        self,
        stream: Stream,
        size: Callable[[int | None], int],
        collate: Callable[[list[Any]], Any],
        skips: bool = False,
    ) -> None:
        self._stream, self._skips = stream._pipeline(), skips
        if self._stream.buffer > 1:
            raise ValueError(
                "`predict` got a shuffled stream, so you could not tell which row a result belongs to. Pass the stream "
                "without `shuffle`."
            )
        self._size = size(self._stream.batch_size)
        self._collate = self._stream.collate or collate
        self._shards = check_shards(self._stream)
        num_rows = self._stream.num_rows(self._shards)
        self.num_batches = None if num_rows is None else -(-num_rows // self._size)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches."""
        rows = islice(self._rows(), self._stream.limit)
        while own := list(islice(rows, self._size)):
            yield self._collate(own)

    def _rows(self) -> Iterator[Any]:
        steps = RowSteps(self._stream.steps, f"{self._stream.seed or 0}/0", skips=self._skips)
        for shard in self._shards:
            for number, row in numbered_rows(self._stream.source.open, shard, 0, self._skips):
                made = row if row is FAILED else steps(row, shard.name, number)
                if made is not FAILED and made is not DROPPED:
                    yield made
