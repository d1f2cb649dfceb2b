"""Sharding of `tf.data` datasets over the replicas.

Each replica creates the same dataset and takes its part of every step:

* `"global"`: A batch of the dataset is a global batch, as with TensorFlow's strategies. Each worker takes one slice of
  the batch, in rank order. The sizes of the slices differ by at most one sample.
* `"worker"`: A batch of the dataset is for one worker. A step takes as many batches as there are workers, concatenates
  them in order, and slices the result in the same way. If the config sets the global batch size, the number of batches
  is the intended number of workers, even while workers are missing.

A step of N workers therefore has the same samples in the same order as a single-process step on the global batch, and
each sample is used once per pass. A dataset whose auto-shard policy is OFF is not sharded, because each worker's
dataset is then already a shard.

ADR 2 explains why data is sharded by global batches.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.core.private_names import require_names

logger = logging.getLogger(__name__)

NO_FIRST_ORDER = (
    "a shuffled validation dataset cannot be copied, so a new worker may read it in another order, and samples may be "
    "repeated or skipped. Remove the shuffle, because validation does not need it"
)

_IGNORE = 1  # TensorFlow's policy to omit external state, such as Python functions, when it serializes a dataset

_ADVICE = "`tf.data.Dataset.from_tensor_slices(...).batch(...)`, or with `from_generator`"
_ADVICE_FOR_INDEXED = (  # a `PyDataset` of Keras 3, or a `Sequence` of tf_keras
    "`tf.data.Dataset.from_generator(lambda: (data[index] for index in range(len(data))), output_signature=...)`, "
    "where `data` is this object and the signature has a `tf.TensorSpec` for each part of a batch, such as "
    "`(tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))`"
)

Sharding = Literal["global", "worker"]


def signature_of(dataset: Any) -> str:
    """Return a string with the dataset's properties, which must be equal on all ranks if raysgd shards the dataset."""
    return f"{int(dataset.cardinality())} batches of {dataset.element_spec!r}"


def is_divided(dataset: Any) -> bool:
    """Return True if raysgd shards the dataset. It shards every dataset except those whose auto-shard policy is OFF."""
    import tensorflow as tf

    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy != tf.data.experimental.AutoShardPolicy.OFF)


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Return a copy of a `tf.data.Dataset` that is marked as one worker's shard, so that raysgd does not shard it."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)


def is_shuffled(dataset: Any) -> bool:
    """Return True if the dataset contains a shuffle. Its order may then change from pass to pass."""
    return bool(_shuffles_of(dataset))


def share_a_shuffle(first: Any, second: Any) -> bool:
    """Return True if both datasets contain the same shuffle, so that a pass over one changes the order of the other."""
    return not _shuffles_of(first).isdisjoint(_shuffles_of(second))


def _shuffles_of(dataset: Any) -> set[int]:
    own = {id(dataset)} if "Shuffle" in type(dataset).__name__ else set()
    require_names(dataset, "_inputs")
    return own.union(*map(_shuffles_of, dataset._inputs()))


def unused_copy(dataset: Any) -> Any:
    """Return a copy of the dataset in the state before its first pass, or None if the dataset cannot be copied.

    TensorFlow stores the random generator of each shuffle outside the dataset, under a name. The copy gets new
    generators under new names. Arrays that are part of the dataset are copied, too.
    """
    import tensorflow as tf

    try:
        text = _packed_graph(dataset, _rename_generators)
        return _dataset_of(text, dataset.element_spec).with_options(dataset.options())
    except (ValueError, tf.errors.OpError) as error:
        logger.info("the order of a shuffled dataset cannot be repeated in this process: %s", error)
        return None


def in_first_order(dataset: Any) -> Any:
    """Return the dataset with its shuffles reset to the order of the first pass, as in a new worker.

    If the dataset cannot be copied, log a warning and return the dataset unchanged.
    """
    copy = unused_copy(dataset) if is_shuffled(dataset) else dataset
    if copy is None:
        logger.warning(NO_FIRST_ORDER)
    return dataset if copy is None else copy


def _packed_graph(dataset: Any, change: Callable[[Any], None]) -> bytes:
    """Serialize a dataset to bytes, after a check or a change of its graph.

    Args:
        dataset: The dataset to serialize.
        change: Function to call with the dataset's graph before it is serialized, to check or modify the graph.

    Raises:
        ValueError: The dataset cannot be serialized, for example because it is too large, or `change` raised an error.
    """
    import tensorflow as tf

    try:
        variant = tf.data.experimental.to_variant(dataset)
        text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_IGNORE).numpy()
        graph = tf.compat.v1.GraphDef.FromString(text)
        change(graph)
        packed: bytes = graph.SerializeToString()
    except Exception as error:  # TensorFlow and protobuf raise errors of various classes
        raise ValueError(str(error)) from error
    return packed


def _dataset_of(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


@dataclass(frozen=True)
class PackedDataset:
    """A serialized dataset that can be sent to other processes. It includes the dataset's arrays."""

    graph: bytes
    element_spec: Any
    is_divided: bool

    def make(self) -> Any:
        """Recreate the dataset in this process, in the state before its first pass."""
        dataset = _dataset_of(self.graph, self.element_spec)
        return dataset if self.is_divided else prepare_dataset_shard(dataset)


def packed(name: str, dataset: Any, advice: str | None = None) -> PackedDataset:
    """Serialize a dataset to send it to other processes.

    Args:
        name: Name of the dataset in error messages.
        dataset: The dataset to serialize.
        advice: What to do if the dataset cannot be sent, for the error message.

    Raises:
        ValueError: The dataset depends on Python functions of this process, or is too large.
    """
    advice = f"`{name}`: " + (
        advice or "make this dataset in `data_creator` instead, with `config['fit_config']['validation_data'] = ...`"
    )

    def refuse_functions(graph: Any) -> None:
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        if any("PyFunc" in node.op for node in nodes):
            raise ValueError("it calls Python functions, such as a generator, which only this process has")

    try:
        text = _packed_graph(dataset, refuse_functions)
    except ValueError as error:
        raise ValueError(f"{advice}. It cannot be sent to the workers: {error}") from error
    return PackedDataset(text, dataset.element_spec, is_divided(dataset))


def unpacked(dataset: Any) -> Any:
    """Return a dataset unchanged, or the dataset that a `PackedDataset` contains."""
    return dataset.make() if isinstance(dataset, PackedDataset) else dataset


def check_can_be_divided(name: str, data: Any) -> None:
    """Check that workers can shard a user's validation data. The check does not load TensorFlow in the driver.

    Raises:
        TypeError: `data` contains an object that is neither a dataset nor an array.
    """
    others = [leaf for leaf in _leaves(data) if leaf is not None and not hasattr(leaf, "shape")]
    kinds = sorted({f"`{type(leaf).__name__}`" for leaf in others if not hasattr(leaf, "element_spec")})
    if kinds:
        raise TypeError(
            f"`{name}` is made of {', '.join(kinds)}: need a `tf.data.Dataset` of batches, or arrays in a tuple "
            "`(x, y)` or `(x, y, sample_weight)`, so that the workers can divide it. Make a dataset of anything else "
            "with `tf.data.Dataset.from_generator`, in `data_creator`."
        )


def _leaves(data: Any) -> Iterator[Any]:
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, list | tuple):
        for part in parts:
            yield from _leaves(part)
    else:
        yield parts


def evaluation_dataset(name: str, data: Any, batch_size: int) -> Any:
    """Convert the `validation_data` of `fit` to a dataset of batches.

    Args:
        name: Name of the data in error messages.
        data: A dataset, a `PackedDataset`, or arrays in the form that `fit` accepts.
        batch_size: Batch size for arrays.

    Raises:
        TypeError: `data` is neither a dataset nor arrays.
        ValueError: The dataset's elements are not batches.
    """
    import tensorflow as tf

    data = unpacked(data)
    if isinstance(data, tf.data.Dataset):
        check_dataset(name, data)
        return data
    check_can_be_divided(name, data)
    parts = tuple(part for part in (data if isinstance(data, list | tuple) else (data,)) if part is not None)
    as_tuples = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    return tf.data.Dataset.from_tensor_slices(as_tuples).batch(batch_size)


def _rename_generators(graph: Any) -> None:
    """Assign a new random generator to each shuffle in a dataset's graph, by renaming the generator in the graph."""
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if node.op not in ("ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2"):
            continue
        for name in node.input:
            constant = nodes[name.partition(":")[0]]
            for handle in constant.attr["value"].tensor.resource_handle_val:
                handle.name = f"raysgd/{uuid.uuid4().hex}"


def noting_passes(dataset: Any, skipped: int, note: Callable[[], None]) -> Any:
    """Return the dataset without its first `skipped` batches. Each iteration over the result first calls `note`."""
    import tensorflow as tf

    def begin(_: Any) -> Any:
        with tf.control_dependencies([tf.py_function(note, [], [])]):
            return dataset.skip(tf.identity(tf.constant(skipped, tf.int64)))

    noting = tf.data.Dataset.range(1).flat_map(tf.autograph.experimental.do_not_convert(begin))
    number = int(dataset.cardinality())
    if number >= 0:
        number = max(0, number - skipped)
    if number != tf.data.UNKNOWN_CARDINALITY:
        noting = noting.apply(tf.data.experimental.assert_cardinality(number))
    return noting.with_options(dataset.options())


def check_dataset(name: str, dataset: Any) -> None:
    """Check that `dataset` is a `tf.data.Dataset` of batches.

    Raises:
        TypeError: `dataset` is not a `tf.data.Dataset`.
        ValueError: The dataset's elements are not batches.
    """
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`{name}` is a `{type(dataset).__name__}`: need a `tf.data.Dataset` of batches. Create one with "
            f"{_ADVICE_FOR_INDEXED if hasattr(dataset, 'on_epoch_end') else _ADVICE}."
        )
    scalars = [spec for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank == 0]
    if scalars:
        raise ValueError(f"`{name}` yields {scalars[0]}, which is not a batch: call `.batch(batch_size)` on it.")
    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank} - {None}
    if len(sizes) > 1:
        raise ValueError(
            f"`{name}` yields {dataset.element_spec}, whose tensors differ in the first dimension {sorted(sizes)}, so "
            "it is not a batch: call `.batch(batch_size)` on it."
        )


def batch_size_of(dataset: Any) -> int | None:
    """Return the batch size of a dataset that raysgd shards, or None if TensorFlow does not know it.

    TensorFlow knows it after `.batch(size, drop_remainder=True)`.
    """
    import tensorflow as tf

    if dataset is None or not is_divided(dataset):
        return None
    sizes = {spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank}
    return sizes.pop() if len(sizes) == 1 else None


def refuse_sparse(dataset: Any) -> None:
    """Check that a dataset's batches can be sliced into one part per worker.

    Raises:
        ValueError: The batches contain a `SparseTensor`.
    """
    import tensorflow as tf

    sparse = [spec for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.SparseTensorSpec)]
    if sparse:
        raise ValueError(
            f"a dataset yields {sparse[0]}, but only dense and ragged tensors can be sharded. Make the tensor dense: "
            "`dataset.map(lambda x, y: (tf.sparse.to_dense(x), y))`."
        )


def global_batches(dataset: Any, sharding: Sharding, num_batches: int) -> Any:
    """Return a dataset that yields one global batch for each step.

    With "global" sharding, this is the dataset itself. With "worker" sharding, each global batch is the concatenation
    of `num_batches` batches of the dataset.
    """
    refuse_sparse(dataset)
    if sharding == "global" or num_batches == 1:
        return dataset
    grouped = dataset.ragged_batch(num_batches)
    return grouped.map(_on_element(grouped, _joined))


def part_of(dataset: Any, rank: int, num_workers: int) -> Any:
    """Return a dataset with this rank's part of each global batch.

    If a global batch has fewer samples than there are workers, some ranks' parts are empty.
    """
    return dataset.map(_on_element(dataset, lambda batch: _part(batch, rank, num_workers))).prefetch(2)


def counted_part_of(dataset: Any, rank: int, num_workers: int) -> Any:
    """Return a dataset with a tuple `(part, number, total, weights)` for each global batch.

    `part` is this rank's part of the batch. `number` counts the part's samples, and `total` the global batch's samples.
    `weights` has the sums of the sample weights in the part and in the global batch. If this rank has no samples,
    `number` is 0 and `part` has another rank's sample, so that this rank can take part in the step.
    """

    def counted(batch: Any) -> Any:
        import tensorflow as tf

        part = _part(batch, rank, num_workers)
        own, total = num_samples(part), num_samples(batch)
        shown = tf.cond(own > 0, lambda: part, lambda: tf.nest.map_structure(lambda tensor: tensor[:1], batch))
        return shown, own, total, tf.stack([sum_of_weights(part), sum_of_weights(batch)])

    return dataset.map(_on_element(dataset, counted)).prefetch(2)


def without_empty(dataset: Any) -> Any:
    """Return the dataset without its empty batches."""
    return dataset.filter(_on_element(dataset, lambda batch: num_samples(batch) > 0))


def own_part_of(dataset: Any, num_workers: int) -> Any:
    """Split each batch of this worker's own dataset into one piece per worker, and return a dataset of the pieces.

    If the user batches by the global batch size, each piece has the size of one worker's batch, as with TensorFlow's
    strategies. Empty pieces are dropped.
    """

    def pieces(batch: Any) -> Any:
        import tensorflow as tf

        return without_empty(tf.data.Dataset.range(num_workers).map(lambda piece: _part(batch, piece, num_workers)))

    return dataset.flat_map(_on_element(dataset, pieces))


def after_samples(dataset: Any, consumed: int) -> Any:
    """Return a dataset of batches without its first `consumed` samples. The first remaining batch may be incomplete."""
    import tensorflow as tf

    def cut(seen: Any, batch: Any) -> Any:
        start = tf.maximum(tf.constant(consumed, tf.int64) - seen, 0)
        return seen + num_samples(batch), tf.nest.map_structure(lambda tensor: tensor[start:], batch)

    if not consumed:
        return dataset
    return without_empty(dataset.scan(tf.constant(0, tf.int64), tf.autograph.experimental.do_not_convert(cut)))


def num_samples(batch: Any) -> Any:
    """Return the number of samples in a batch as a tensor: the size of the first dimension of its first tensor."""
    import tensorflow as tf

    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def sum_of_weights(batch: Any) -> Any:
    """Return the sum of the sample weights in a batch `(x, y, sample_weight)`. Return 0 if the batch has no weights."""
    import tensorflow as tf

    weights = batch[2] if isinstance(batch, tuple) and len(batch) > 2 else None
    return tf.reduce_sum(tf.cast(weights, tf.float64)) if tf.is_tensor(weights) else tf.constant(0.0, tf.float64)


def zeros_like(dataset: Any) -> Any:
    """Return a dataset that contains one batch of zeros and has the same element spec as the given dataset."""
    import tensorflow as tf

    batch = zeros(dataset.element_spec, 1)
    made = tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=dataset.element_spec)
    return made.apply(tf.data.experimental.assert_cardinality(1))  # without the length, Keras warns at the end


def zeros(element_spec: Any, num_samples: int) -> Any:
    """Return a batch of zeros, or of empty strings, with the given element spec.

    Dimensions of unknown size get the size `num_samples`.
    """
    import tensorflow as tf

    def of(part: Any) -> Any:
        shape = [num_samples if size is None else size for size in part.shape]
        return tf.fill(shape, "") if part.dtype == tf.string else tf.zeros(shape, part.dtype)

    return tf.nest.map_structure(of, element_spec)


def _on_element(dataset: Any, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Adapt a function of one element for `dataset.map` and similar methods.

    These methods pass the items of a tuple as separate arguments. AutoGraph is disabled for the function. The functions
    in this module do not need AutoGraph, which would write a file for each function.
    """
    import tensorflow as tf

    refuse_sparse(dataset)

    wrapped = (lambda *batch: function(batch)) if isinstance(dataset.element_spec, tuple) else function
    return tf.autograph.experimental.do_not_convert(wrapped)


def _part(batch: Any, rank: Any, num_workers: int) -> Any:
    import tensorflow as tf

    def bounds(total: Any) -> tuple[Any, Any]:
        base, num_larger = total // num_workers, total % num_workers
        if isinstance(total, int) and isinstance(rank, int):
            start = rank * base + min(rank, num_larger)
            return start, start + base + int(rank < num_larger)
        own = tf.cast(rank, tf.int64)
        start = own * base + tf.minimum(own, num_larger)
        return start, start + base + tf.cast(own < num_larger, tf.int64)

    first = tf.nest.flatten(batch)[0]
    start, stop = bounds(first.shape[0] if first.shape.rank and first.shape[0] else num_samples(batch))
    return tf.nest.map_structure(lambda tensor: tensor[start:stop], batch)


def _joined(batches: Any) -> Any:
    """Concatenate the batches that `dataset.ragged_batch` has stacked."""
    import tensorflow as tf

    def join(tensor: Any) -> Any:
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.merge_dims(0, 1)
        return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))

    return tf.nest.map_structure(join, batches)
