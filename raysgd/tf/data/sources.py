"""Sources that yield a replica's batches, and the cursor that draws them.

Sources are made of registered datasets, of `raysgd.data.Stream`s, of Ray Data, whose batches are converted to those of
`tf.data`, and of data that a user passes to one call, such as `trainer.validate(dataset=...)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from raysgd.core.arrays import trees, user_data
from raysgd.core.arrays.division import NO_BATCH, PlannedBatch, plan_of
from raysgd.core.arrays.user_data import (
    Arrays,
    BatchForm,
    CallData,
    Kind,
    RayLoader,
    RepeatedBatches,
    as_arrays,
    formed,
    goes_to_all,
    size_of,
    stacked,
)
from raysgd.core.connections.group import EarlyVotes, Group
from raysgd.core.engine.shared.types import World
from raysgd.streams.global_reader import Numbers, StartSum
from raysgd.streams.loaders import ArrayCollate
from raysgd.streams.source import BatchesInOrder, StreamData, StreamSource, check_batched
from raysgd.streams.stream import Stream
from raysgd.tf.objects import datasets
from raysgd.tf.objects.datasets import Sharding, prepare_dataset_shard
from raysgd.trainer.messages import prediction
from raysgd.trainer.messages.prediction import (
    BatchRequest,
    PredictionSource,
    Work,
    num_rows_of,
    refuse,
)
from raysgd.trainer.worker.feed import in_lockstep

logger = logging.getLogger(__name__)


class Passes:
    """A dataset, and the number of passes over it that this process has started.

    The order of a dataset that is reshuffled in each pass depends on how many passes were started. To go back to an
    earlier pass, this class replaces the dataset with an unused copy. It then starts all passes before the wanted one.
    """

    def __init__(self, dataset: Any) -> None:
        self._original = dataset
        self._copy: Any = None
        self.dataset = dataset
        self.num_begun = 0
        self.num_samples: int | None = None  # number of samples per pass; known once a pass has ended
        self.is_shuffled = datasets.is_shuffled(dataset)

    def begin_pass(self) -> None:
        """Count one more pass over the dataset. Call this when a pass starts."""
        self.num_begun += 1

    def can_repeat(self) -> bool:
        """Return True if this process can repeat a pass in the same order.

        Repeating a pass of a shuffled dataset requires an unused copy of the dataset. This method creates the copy.
        """
        if self.is_shuffled and self._copy is None:
            self._copy = datasets.unused_copy(self._original)
        return not self.is_shuffled or self._copy is not None

    def go_to(self, index: int) -> bool:
        """Ensure that the next pass over the dataset is the pass with this index. Return False if impossible.

        To advance the shuffle, this method starts all earlier passes. If the dataset is not shuffled, all passes are
        equal, and the method does nothing.
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
        """Return the dataset without its first `skipped` batches, for Keras's loops.

        For a shuffled dataset, each iteration over the returned dataset is counted as a pass.
        """
        if not self.is_shuffled:
            return self.dataset.skip(skipped) if skipped else self.dataset
        return datasets.noting_passes(self.dataset, skipped, self.begin_pass)


class TFDividedSource:
    """Yields this rank's batches of a dataset that raysgd shards.

    Args:
        passes: Holds the dataset, which must be the same on all ranks.
        sharding: "global" if a batch is a global batch, "worker" if a batch is for one worker.
        world: This rank and the number of ranks.
        pads: Whether a rank without samples gets padding, so that it takes part in the step. Training requires this.
        num_global: With "worker" sharding, how many of the dataset's batches a step takes.
        seed: Seed that determines the order of a shuffled dataset.
    """

    is_divided, left_out = True, 0

    def __init__(
        self, passes: Passes, sharding: Sharding, world: World, pads: bool, num_global: int, seed: int
    ) -> None:
        self._passes, self._sharding, self._world, self._pads = passes, sharding, world, pads
        self._num_global, self._seed = num_global, seed

    def join(self, ranks: Any) -> None:
        """Do nothing, because the ranks compute their shards of the dataset without communication."""

    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        if self._pads:  # in training, the order of a pass must depend only on the index of the pass
            self._passes.go_to(pass_index)
        self._passes.begin_pass()
        batches = self._global(datasets.after_samples(self._passes.dataset, consumed))
        for batch, own, total, weights in datasets.counted_part_of(batches, self._world.rank, self._world.size):
            plan = plan_of(int(own), int(total))._replace(sample_weights=tuple(weights.numpy()))
            consumed += int(total)
            if plan.num_samples or self._pads:
                yield PlannedBatch(batch, plan, used_after=consumed)
        self._passes.num_samples = consumed

    @property
    def num_samples(self) -> int | None:
        """Number of samples in a pass over the dataset. None until this process has finished a pass."""
        return self._passes.num_samples

    def num_steps(self) -> int | None:
        number = int(self._global(self._passes.dataset).cardinality())
        return number if number >= 0 else None

    def _global(self, dataset: Any) -> Any:
        return datasets.global_batches(dataset, self._sharding, self._num_global)

    def state(self, consumed: int, is_mid_pass: bool) -> dict[str, Any]:
        """Return what this source adds to a saved position in the data: the seed of the order."""
        return {"seed": self._seed}

    def load_state(self, position: Mapping[str, Any]) -> bool:
        """Go to the pass of a saved position, or to the next pass if the saved pass had ended.

        Return False if this process cannot repeat the order of the samples.
        """
        is_mid_pass = position["is_mid_pass"]
        num_passes = position["pass_index"] + (0 if is_mid_pass else 1)
        is_same_order = position["seed"] == self._seed or not self._passes.is_shuffled
        if is_same_order and self._passes.go_to(num_passes):
            return True
        if is_mid_pass:
            logger.warning(
                "the train dataset is shuffled, but this process cannot repeat the order of the interrupted pass, so a "
                "fresh pass starts. To repeat the order, load the state into a new trainer with `seed=%s`.",
                position["seed"],
            )
        return False


class OwnSource:
    """Yields the batches of a dataset that raysgd does not shard, because each rank's dataset is already a shard.

    Ranks that step together may have different numbers of batches. A rank that runs out of batches repeats its last
    batch with weight 0 until all ranks have run out.

    Args:
        dataset: This rank's batches, a `tf.data.Dataset` or any iterable.
        votes: Votes by which the ranks find out that all of them have run out of batches. None if ranks do not step
            together.
    """

    is_divided = False

    def __init__(self, dataset: Any, votes: EarlyVotes | None) -> None:
        self._dataset, self._votes = dataset, votes

    def join(self, ranks: Any) -> None:
        """Do nothing, because the votes already use the connections of the current group."""

    def open(self, pass_index: int, consumed: int) -> Iterator[PlannedBatch]:
        """Start a pass over this rank's dataset and yield the batches of the pass."""
        votes = self._votes
        items = (PlannedBatch(batch, plan_of(int(datasets.num_samples(batch)), 0)) for batch in self._dataset)
        if votes is None:
            return items
        joint = in_lockstep(items, lambda item: votes.ask(item is not NO_BATCH), "dataset")
        return (item if is_own else PlannedBatch(item.batch, plan_of(0, 0)) for item, is_own, _ in joint)

    def num_steps(self) -> int | None:
        number = int(self._dataset.cardinality()) if hasattr(self._dataset, "cardinality") else -1
        return number if self._votes is None and number >= 0 else None


TFSource: TypeAlias = TFDividedSource | OwnSource | StreamSource
"""A source of a replica's batches."""


def lockstep_dataset(dataset: Any, votes: EarlyVotes) -> Any:
    """Return a dataset for `fit` with this rank's batches, followed by empty batches until all ranks have run out.

    TensorFlow must not prefetch from the returned dataset. The ranks vote on each batch that is drawn, and with
    prefetching they would also vote on batches that `fit` never uses.
    """
    import tensorflow as tf

    def generate() -> Iterator[Any]:
        for item in OwnSource(dataset, votes).open(0, 0):
            batch = item.batch
            yield batch if item.plan.num_samples else tf.nest.map_structure(lambda tensor: tensor[:0], batch)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.from_generator(generate, output_signature=dataset.element_spec).with_options(options)


@dataclass(frozen=True)
class TFRanks:
    """A replica's rank and group. The source that reads a stream uses them to all-reduce numbers between two steps.

    Attributes:
        rank: This replica's rank.
        world_size: The number of replicas.
        group: The group through which the replicas communicate.
    """

    rank: int
    world_size: int
    group: Group

    def adding(self) -> StartSum:
        """Return a function that sums numbers over all ranks. Its result is a function that returns the sums.

        The all-reduce runs at once instead of in the background, because all ranks must run the collectives of a group
        in the same order.
        """

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            self.group.add_up(numbers)
            return lambda: numbers

        return start


def source_of(data: StreamData, ranks: TFRanks, seed: int) -> StreamSource:
    """Return the source that reads a replica's batches from a stream."""
    return StreamSource(data, ranks, seed, array_collate(), partial(_tensors, data.loader.collate is not None))


def _tensors(has_own_collate: bool, batch: Any, num_samples: int) -> Any:
    import tensorflow as tf

    tensors = tf.nest.map_structure(tf.convert_to_tensor, batch)
    if has_own_collate and num_samples and (num_out := int(datasets.num_samples(tensors))) != num_samples:
        raise ValueError(
            f"the `collate` of a stream turned {num_samples} rows into {num_out} samples, but batches count rows. Skip "
            "rows with `filter`. To turn one row into several, do so in the shards."
        )
    return tensors


def dataset_of(stream: Stream) -> Any:
    """Return the batches of a stream as a `tf.data.Dataset`, in the order of the shards.

    This reads the first row of the stream, to determine the element spec.

    Raises:
        ValueError: The stream has no batch size or no rows.
    """
    import tensorflow as tf

    in_order = replace(check_batched(stream, "a stream"), buffer=1)
    collate = array_collate()
    first = next(iter(BatchesInOrder(in_order, lambda own: 1, collate, in_order.skips)), None)
    if first is None:
        raise ValueError("the stream has no rows.")
    signature = tf.nest.map_structure(spec_of, first)
    batches = BatchesInOrder(in_order, lambda own: own or 1, collate, in_order.skips)
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def dataset_over(loader: RayLoader) -> Any:
    """Return a `tf.data.Dataset` over a loader's batches. The loader may receive the batches later.

    The dataset is marked as already sharded. To determine the element spec, this function reads the first row of the
    Ray Data dataset.
    """
    import tensorflow as tf

    first = as_batch(loader.batches.dataset.take_batch(1, batch_format="numpy"), loader.batches.form)
    signature = tf.nest.map_structure(spec_of, first)
    return prepare_dataset_shard(tf.data.Dataset.from_generator(lambda: iter(loader), output_signature=signature))


def as_batch(arrays: Any, form: BatchForm) -> Any:
    """Convert columns to a batch of arrays, in the dtypes that models expect and in the structure of `form`."""
    return formed(trees.mapped(arrays, as_array), form, _joined)


def as_array(values: Any) -> Any:
    """Return a column's values as an array. Convert float64 to Keras's default dtype `floatx`, usually float32."""
    import tensorflow as tf

    values = stacked(values)
    return values.astype(tf.keras.backend.floatx()) if values.dtype == np.float64 else values


def array_collate() -> ArrayCollate:
    """Return a function that collates rows into a batch of arrays, in the dtypes that models expect."""
    return ArrayCollate(lambda values: as_array(np.asarray(values)))


def _joined(columns: list[Any]) -> Any:
    """Concatenate columns into one matrix with a row per sample. A column of scalars becomes one matrix column."""
    return np.concatenate([column[:, None] if column.ndim == 1 else column for column in columns], axis=1)


def spec_of(values: Any) -> Any:
    """Return the `TensorSpec` of an array in a batch, with a variable number of rows."""
    import tensorflow as tf

    tensor = tf.convert_to_tensor(values)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


_ADVICE = "Pass a function `(config, batch_size)` that makes the dataset in each worker"


def check(dataset: Any, name: str = "dataset", *, with_fit: bool = False, training: bool = False) -> None:
    """Check that a call such as `trainer.validate` can use the data that the user passed to it.

    Args:
        dataset: The data that the user passed to the call.
        name: Name of the call's argument, for error messages.
        with_fit: True if Keras's own loops draw the batches.
        training: True if the call trains.

    Raises:
        TypeError: The type of `dataset` is not supported.
        ValueError: The call trains with Keras's own `fit`, which uses only the dataset from `data_creator`.
    """
    if dataset is None:
        return
    if with_fit and training:
        raise ValueError(
            "`train(dataset=...)` with creators cannot work: `fit` trains on what `data_creator` returns. Pass "
            "`training_operator_cls`, or return the dataset from `data_creator`."
        )
    kind = kind_of(dataset)
    if kind is not None and (not with_fit or (goes_to_all(kind) and not isinstance(dataset, Stream))):
        return
    raise TypeError(
        f"`{name}=` got `{type(dataset).__name__}`: need a `tf.data.Dataset` of batches, arrays or a data frame, a "
        "dataset of Ray Data, a stream, or a function `(config, batch_size)` that returns a `tf.data.Dataset`."
    )


def kind_of(dataset: Any) -> Kind | None:
    """Return what kind of data a user passed to a call, such as "rows". Return None if the type is not supported."""
    if is_dataset(dataset) or isinstance(dataset, Stream):
        return "batches"
    kind = user_data.kind_of(dataset)
    # Datasets of the kind "shards" yield PyTorch tensors, which TensorFlow cannot use.
    return None if kind == "shards" else kind


def is_dataset(dataset: Any) -> bool:
    """Return True for a `tf.data.Dataset`, without importing TensorFlow."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def call_data_of(dataset: Any, config: Mapping[str, Any], seed: int, *, travels: bool) -> CallData | None:
    """Wrap the data that a user passed to a call, for use in the workers. Return None if its type is not supported.

    Args:
        dataset: The data that the user passed to the call.
        config: The config of a worker's operator, which may hold the batch size.
        seed: Seed that determines the order of shuffled arrays.
        travels: Whether the data must be serialized, to be sent to other processes.

    Raises:
        ValueError: A dataset does not consist of batches or cannot be sent to the workers, an `Arrays` has a transform,
            or there is no batch size.
    """
    kind = kind_of(dataset)
    if kind == "rows":
        data = dataset if isinstance(dataset, Arrays) else Arrays(dataset)
        return CallData(kind, _dataset_maker(data, config, seed))
    if kind != "batches":
        return user_data.call_data_of(dataset, config)
    if isinstance(dataset, Stream):
        return CallData(kind, dataset)
    datasets.check_dataset("dataset", dataset)
    return CallData(kind, datasets.packed("dataset", dataset, _ADVICE) if travels else dataset)


def _dataset_maker(data: Arrays, config: Mapping[str, Any], seed: int) -> Callable[[], Any]:
    if data.transform is not None:
        raise ValueError(
            "`Arrays(transform=...)` with a `TFTrainer` cannot work: `tf.data` transforms in graphs. Pass a "
            "`tf.data.Dataset` with `map`."
        )
    size = size_of(f"a `{type(data.data).__name__}`", data.batch_size, config)
    rows = as_arrays(plain(data.data), in_columns=data.feature_columns is not None)
    num_rows = num_rows_of(rows)
    return partial(_dataset_over, rows, data.form, size, num_rows if data.shuffle else 0, data.drop_last, seed)


def _dataset_over(arrays: Any, form: BatchForm, size: int, num_shuffled: int, drop_last: bool, seed: int) -> Any:
    """Return arrays as a `tf.data.Dataset` of batches. Called in the workers.

    If `num_shuffled` is not 0, it is the size of the shuffle buffer, and the rows are reshuffled in each pass.
    """
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(as_batch(arrays, form))
    rows = rows.shuffle(num_shuffled, seed=seed) if num_shuffled else rows
    return rows.batch(size, drop_remainder=drop_last)


def batches_of(share: CallData, is_distributed: bool) -> Any:
    """Return the batches of the data that the user passed to a call. Called in a worker.

    If every worker has received the whole data, the returned batches are not sharded yet. If the data is a `Stream`, it
    is returned unchanged.

    Raises:
        TypeError, ValueError: A creator did not return a dataset of batches.
        ValueError: A shuffled dataset would have a different order on each worker.
    """
    if share.kind == "ray":
        return RepeatedBatches(lambda: share.data.batches(as_batch))
    if share.kind == "rows":
        return share.data()
    dataset = share.data() if share.kind == "creator" else datasets.unpacked(share.data)
    if isinstance(dataset, Stream):
        return dataset
    datasets.check_dataset("what the creator in `dataset=` returned", dataset)
    if is_distributed and datasets.is_shuffled(dataset) and datasets.is_divided(dataset):
        raise ValueError(
            "`dataset=` got a shuffled `tf.data.Dataset`, which each worker would shuffle differently. Pass "
            "`raysgd.data.Arrays(data, shuffle=True)`, or register the dataset in `setup`."
        )
    return dataset


KINDS = (
    "an array or tensor, a tuple or dict of them, a data frame, a `tf.data.Dataset` of batches, a dataset of Ray Data, "
    "a stream, or an iterator over batches"
)


def source_to_predict(data: Any, asked: BatchRequest) -> PredictionSource:
    """Return the source of the batches for a `predict` call.

    Raises:
        TypeError: The type of `data` is not supported.
        ValueError: The data is a shuffled dataset, so predictions could not be matched to rows.
    """
    if isinstance(data, Arrays):
        data = replace(data, data=plain(data.data))
    source = prediction.source_of(plain(data), asked)
    if source is not None:
        return source
    if isinstance(data, Stream):
        batches = BatchesInOrder(data, asked.size, ArrayCollate())  # plain arrays, without TensorFlow in the driver
        return PredictionSource(iter(batches), batches.num_batches)
    if is_dataset(data):
        return _of_dataset(data)
    if not isinstance(data, Iterable) or isinstance(data, Sequence | Mapping | set | frozenset):
        raise refuse(data, KINDS)
    given = (plain(tuple(each) if isinstance(each, list) else each) for each in data)
    return PredictionSource(given, None)


def _of_dataset(dataset: Any) -> PredictionSource:
    datasets.check_dataset("data", dataset)
    if datasets.is_shuffled(dataset):
        raise ValueError(
            "`predict` got a shuffled `tf.data.Dataset`, so you could not tell which row a result belongs to. Pass the "
            "dataset without `shuffle`."
        )
    number = int(dataset.cardinality())
    return PredictionSource(dataset.as_numpy_iterator(), number if number >= 0 else None)


def batches_to_predict(work: Work) -> Iterator[tuple[Any, int]]:
    """Yield `(batch, number of rows)` for each batch that this worker predicts in one round of a `predict` call."""
    assert not work.are_rows, "datasets of PyTorch only"
    return work.made(as_batch, lambda batch: trees.rows_of(next(iter(trees.leaves(batch)))[1]) or 0)


def plain(data: Any) -> Any:
    """Convert all tensors in nested tuples and dicts to NumPy arrays. Other objects, such as lists, stay unchanged."""
    is_tree = isinstance(data, tuple | Mapping) or hasattr(data, "numpy")
    return trees.mapped(data, lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf) if is_tree else data


def inputs(batch: Any, has_target: bool) -> Any:
    """Return only the model's inputs from a batch that may also contain targets and sample weights.

    Args:
        batch: The batch. If it is not a tuple, it contains only inputs.
        has_target: True if the tuple's first item holds the inputs. If False, all items are inputs.
    """
    if not isinstance(batch, tuple):
        return batch
    return batch[0] if has_target or len(batch) == 1 else batch
