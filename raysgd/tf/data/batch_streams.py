"""Sources of a replica's batches, the stream over them, and streams as registered data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from raysgd.core.arrays.division import Division
from raysgd.core.connections.group import EarlyVotes, Group
from raysgd.core.engine.shared.types import DataLedger, World
from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.streams.source import BatchesInOrder, StreamData, StreamSource, check_batched, stream_data
from raysgd.streams.stream import Stream
from raysgd.tf.data.ray_dataset import array_collate, spec_of
from raysgd.tf.objects import datasets
from raysgd.tf.objects.datasets import Sharding
from raysgd.tf.parallel.step import TFStep
from raysgd.trainer.worker.data import batch_streams
from raysgd.trainer.worker.data.batch_streams import NO_BATCH
from raysgd.trainer.worker.data.feed import has_divided_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamItem:
    """A batch of one replica.

    Attributes:
        batch: The batch.
        num_samples: This rank's samples in the step; 0 if the batch only lets the rank take part.
        num_global: Samples of all ranks in the step; 0 if unknown.
        weights: Sums of the sample weights, of this rank and of all ranks; 0 if there are none.
    """

    batch: Any
    num_samples: int
    num_global: int
    weights: tuple[float, float] = (0.0, 0.0)


class Passes:
    """A dataset, and how many passes over it were begun in this process.

    If a dataset is shuffled in each pass, its order depends on that number, which only grows. To go back, the dataset
    is replaced by an unused copy.
    """

    def __init__(self, dataset: Any) -> None:
        self._original = dataset
        self._copy: Any = None
        self.dataset = dataset
        self.num_begun = 0
        self.num_samples: int | None = None  # of a pass; known once a pass has ended
        self.is_shuffled = datasets.is_shuffled(dataset)

    def begin_pass(self) -> None:
        """Count a pass that begins."""
        self.num_begun += 1

    def can_repeat(self) -> bool:
        """Return True if a pass can be begun again in the same order."""
        if self.is_shuffled and self._copy is None:
            self._copy = datasets.unused_copy(self._original)
        return not self.is_shuffled or self._copy is not None

    def go_to(self, index: int) -> bool:
        """Make the next pass the one with this index, by beginning the earlier ones. Return False if impossible.

        Without a shuffle all passes are equal.
        """
        if not self.is_shuffled:
            return True
        if self.num_begun > index:
            if not self.can_repeat():
                return False
            self.dataset, self._copy, self.num_begun = self._copy, None, 0
        while self.num_begun < index:
            iter(self.dataset)
            self.num_begun += 1
        return True

    def counted(self, skipped: int) -> Any:
        """Return the dataset without its first batches, for loops of Keras: it counts its passes itself."""
        if not self.is_shuffled:
            return self.dataset.skip(skipped) if skipped else self.dataset
        return datasets.noting_passes(self.dataset, skipped, self.begin_pass)


class TFDividedSource:
    """A dataset that raysgd divides.

    Args:
        passes: The dataset, the same on all ranks.
        sharding: "global" or "worker": a batch is for all workers together, or for one.
        world: The rank and the number of ranks.
        pads: True if a rank without samples still takes part in a step, as it must in training.
        num_global: Number of one worker's batches in a step; None for the number of workers.
        seed: Seed of the order of a shuffled dataset.
    """

    is_divided = True

    def __init__(
        self,
        passes: Passes,
        sharding: Sharding,
        world: World,
        pads: bool,
        num_global: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._passes, self._sharding, self._world, self._pads, self._seed = passes, sharding, world, pads, seed
        self._num_global = world.size if num_global is None else num_global

    def join(self, ranks: Any) -> None:
        """Do nothing: all ranks divide in the same way, without communicating."""

    def open(self, pass_index: int, consumed: int) -> Iterator[StreamItem]:
        if self._pads:  # the order of a training pass depends only on its index, not on earlier passes
            self._passes.go_to(pass_index)
        self._passes.begin_pass()
        batches = self._global(datasets.after_samples(self._passes.dataset, consumed))
        for batch, own, total, weights in datasets.counted_part_of(batches, self._world.rank, self._world.size):
            item = StreamItem(batch, int(own), int(total), tuple(weights.numpy()))
            consumed += item.num_global
            if item.num_samples or self._pads:
                yield item
        self._passes.num_samples = consumed

    @property
    def num_samples(self) -> int | None:
        """Number of samples in a pass; known once a pass has ended."""
        return self._passes.num_samples

    def num_steps(self) -> int | None:
        number = int(self._global(self._passes.dataset).cardinality())
        return number if number >= 0 else None

    def _global(self, dataset: Any) -> Any:
        return datasets.global_batches(dataset, self._sharding, self._num_global)

    def go_to_pass(self, index: int) -> bool:
        """Make the next pass the one with this index. Return False if that is impossible."""
        return self._passes.go_to(index)

    def state(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """See `raysgd.trainer.worker.data.feed.DataFeed`."""
        return {"seed": self._seed}

    def load_state(self, position: Mapping[str, Any]) -> bool:
        """See `raysgd.trainer.worker.data.feed.DataFeed`."""
        is_mid_pass = position["is_mid_pass"]
        num_passes = position["pass_index"] + (0 if is_mid_pass else 1)
        is_same_order = position["seed"] == self._seed or not self._passes.is_shuffled
        if is_same_order and self.go_to_pass(num_passes):
            return True
        if is_mid_pass:
            logger.warning(
                "the train dataset is shuffled, and this process cannot repeat the order of the pass that was "
                "interrupted: starting a fresh pass. A new trainer with `seed=%s` could.",
                position["seed"],
            )
        return False


class OwnSource:
    """A dataset that is not divided: each rank has its own part.

    Ranks that step together may have different numbers of batches. A rank that runs out repeats its last batch with
    weight 0 until all have run out.

    Args:
        dataset: This rank's batches, a `tf.data.Dataset` or any iterable.
        votes: Lets ranks that step together agree; None for ranks that do not step together.
    """

    is_divided = False

    def __init__(self, dataset: Any, votes: EarlyVotes | None) -> None:
        self._dataset, self._votes = dataset, votes

    def join(self, ranks: Any) -> None:
        """Do nothing: the votes already belong to the group of the call."""

    def open(self, pass_index: int, consumed: int) -> Iterator[StreamItem]:
        """Start a pass."""
        batches = self._alone() if self._votes is None else in_lockstep(self._alone(), self._votes)
        last = None
        for item in batches:
            if item is not None:
                last = item
                yield item
            elif last is None:
                raise ValueError(
                    "The train dataset of this rank is empty while other ranks have data, so it has no batch to step "
                    "with. Give every rank at least one batch."
                )
            else:
                yield StreamItem(last.batch, 0, 0)

    def _alone(self) -> Iterator[StreamItem]:
        for batch in self._dataset:
            yield StreamItem(batch, int(datasets.num_samples(batch)), 0)

    def num_steps(self) -> int | None:
        number = int(self._dataset.cardinality()) if hasattr(self._dataset, "cardinality") else -1
        return number if self._votes is None and number >= 0 else None


TFSource: TypeAlias = TFDividedSource | OwnSource | StreamSource
"""The source of the batches of a pass."""


def in_lockstep(items: Iterator[Any], votes: EarlyVotes) -> Iterator[Any]:
    """Yield the items of this rank, then None until all ranks have run out."""
    coming = next(items, None)
    vote = votes.ask(coming is not None)
    while vote():
        item, coming = coming, next(items, None) if coming is not None else None
        vote = votes.ask(coming is not None)  # the answer arrives while this step is computed
        yield item


def lockstep_dataset(dataset: Any, votes: EarlyVotes) -> Any:
    """Return a dataset for `fit`: this rank's batches, then empty ones until all ranks have run out.

    Nothing is prefetched, because ranks agree on each batch, and a `fit` may end before all batches are drawn.
    """
    import tensorflow as tf

    def generate() -> Iterator[Any]:
        for item in OwnSource(dataset, votes).open(0, 0):
            batch = item.batch
            yield batch if item.num_samples else tf.nest.map_structure(lambda tensor: tensor[:0], batch)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.from_generator(generate, output_signature=dataset.element_spec).with_options(options)


class TFBatchStream(batch_streams.BatchStream[StreamItem, TFStep]):
    """Yields the batches of a source. It looks one batch ahead, so that it knows the last step of a pass in time.

    Args:
        source: Source of the batches.
        step: Gets the weight of each step before its batch is yielded.
        next_pass: Called whenever a new pass begins; returns its index.
        take_part: Takes part in a step of other ranks for which this one has no samples. It gets a batch of the right
            shape, which is not yielded.

    Attributes:
        consumed: Samples of all ranks in the batches of the current pass so far.
    """

    consumed = 0
    _completed = 0

    def __init__(
        self,
        source: Any,
        step: TFStep,
        next_pass: Callable[[], int],
        take_part: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(source, lambda: step, next_pass)
        self._take_part = take_part

    def _undoing_padding(self, batch: Any) -> Iterator[Any]:
        if self._take_part is not None:
            self._take_part(batch)
        return iter(())

    @property
    def completed(self) -> int:
        return self._completed

    def ledger(self) -> DataLedger | None:
        """Return the counts of the pass's samples; None if each rank has its own. May be called from another thread."""
        if not has_divided_source(self):
            return None
        completed = self._completed
        in_flight = max(0, self.consumed - completed) if self._num_open else 0
        due, left_out = self.source.num_samples, getattr(self.source, "left_out", 0)
        return DataLedger(self.pass_index, due, completed, in_flight, left_out=left_out)

    def _settle(self, place: TFStep) -> None:
        super()._settle(place)
        self._completed = self.consumed

    def resume(self, pass_index: int, consumed: int) -> None:
        super().resume(pass_index, consumed)
        self.consumed = self._completed = consumed

    def _begin_pass(self, consumed: int) -> Iterator[StreamItem]:
        self.consumed = self._completed = consumed
        return iter(self.source.open(self.pass_index, consumed))

    def _begin_step(self, place: TFStep, item: StreamItem, is_last: bool) -> Any:
        place.begin_batch(item.num_samples, item.num_global, item.weights)
        self.consumed += item.num_global
        return item.batch


@dataclass(frozen=True)
class TFRanks:
    """The replicas of a group, which add up numbers between two steps.

    Attributes:
        rank: The rank of this replica.
        world_size: The number of replicas.
        group: The group through which they exchange numbers.
    """

    rank: int
    world_size: int
    group: Group

    def adding(self) -> StartSum:
        """Return a function that adds up numbers at once, in the order of all exchanges of the group."""

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            self.group.add_up(numbers)
            return lambda: numbers

        return start


def data_of(stream: Stream, name: str, world: World) -> StreamData:
    """Read the sizes of a stream's shards; `name` is "train" or "validation"."""
    return stream_data(stream, name, Division, world.size)


def source_of(data: StreamData, ranks: TFRanks, seed: int) -> StreamSource:
    """Return the source of the batches of a replica."""
    return StreamSource(data, ranks, seed, array_collate(), partial(_item, data.loader.collate is not None), NO_BATCH)


def _item(
    has_own_collate: bool, batch: Any, weight: float, num_samples: int, num_global: int, *place: Any
) -> StreamItem:
    import tensorflow as tf

    tensors = batch if batch is NO_BATCH else tf.nest.map_structure(tf.convert_to_tensor, batch)
    if has_own_collate and num_samples and (found := int(datasets.num_samples(tensors))) != num_samples:
        raise ValueError(
            f"the `collate` of a stream made {found} samples of {num_samples} rows, by which batches count: leave rows "
            "out with `filter`, or make several of one in the shards."
        )
    return StreamItem(tensors, num_samples, num_global)


def dataset_of(stream: Stream) -> Any:
    """Return the batches of a stream as a `tf.data.Dataset`, in the order of its shards. Reads the first row."""
    import tensorflow as tf

    in_order = replace(check_batched(stream, "a stream"), buffer=1)
    collate = array_collate()
    first = next(iter(BatchesInOrder(in_order, lambda own: 1, collate)), None)
    if first is None:
        raise ValueError("the stream has no rows.")
    signature = tf.nest.map_structure(spec_of, first)
    batches = BatchesInOrder(in_order, lambda own: own or 1, collate)
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
