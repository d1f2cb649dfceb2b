"""How `tf.data` is divided over the replicas.

Each replica makes the same dataset and takes its part of every step:

* `"global"`: a batch of the dataset is that of all workers together, as with TensorFlow's strategies. Each worker takes
  an equal run of it, lower ranks first.
* `"worker"`: a batch of the dataset is that of one worker. As many batches as there are workers make a step, and their
  samples, in order, are divided in the same way.

So N workers see in a step what one process sees in the joint batch, in the same order, and each sample of a pass is
used once. A dataset whose auto-shard policy is OFF is not divided: each worker brings its own part.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

_IGNORE = 1  # state outside of a dataset, such as that of Python functions, stays what it is

Sharding = Literal["global", "worker"]


@dataclass(frozen=True)
class DatasetSignature:
    """What must be alike on all ranks for a dataset to be divided."""

    element_spec: str
    num_batches: int


def signature_of(dataset: Any) -> DatasetSignature:
    """What the ranks compare."""
    return DatasetSignature(repr(dataset.element_spec), int(dataset.cardinality()))


def is_divided(dataset: Any) -> bool:
    """Whether the library divides it: not if its auto-shard policy is OFF."""
    import tensorflow as tf

    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy != tf.data.experimental.AutoShardPolicy.OFF)


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """A `tf.data.Dataset` that is a worker's part already, marked so that nobody divides it once more."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)


def is_shuffled(dataset: Any) -> bool:
    """Whether a shuffle is part of the dataset, so that its order may differ from pass to pass."""
    return "Shuffle" in type(dataset).__name__ or any(is_shuffled(part) for part in dataset._inputs())


def unused_copy(dataset: Any) -> Any:
    """The same dataset as if no pass over it had been begun yet, so that its shuffles begin anew; None if it has none.

    A shuffle draws the order of each pass from a generator, which lies apart from the dataset under a name. In the copy
    the name is another one. Arrays in the dataset are copied, too.
    """
    import tensorflow as tf

    try:
        variant = tf.data.experimental.to_variant(dataset)
        graph = tf.compat.v1.GraphDef.FromString(
            tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_IGNORE).numpy()
        )
        _rename_generators(graph)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        copy = tf.data.experimental.from_variant(variant, dataset.element_spec)
        return copy.with_options(dataset.options())
    except Exception as error:  # too large for a message, for instance
        logger.info("the order of a shuffled dataset cannot be repeated here: %s", error)
        return None


def _rename_generators(graph: Any) -> None:
    """Gives every shuffle in the graph a generator of its own: one that does not exist is made."""
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if node.op not in ("ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2"):
            continue
        for name in node.input:
            constant = nodes[name.partition(":")[0]]
            for handle in constant.attr["value"].tensor.resource_handle_val:
                handle.name = f"raysgd/{uuid.uuid4().hex}"


def noting_passes(dataset: Any, skipped: int, note: Callable[[], None]) -> Any:
    """The dataset without its first batches, which calls `note` whenever somebody begins to draw from it."""
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
    """Refuses what is no batched `tf.data.Dataset`.

    Raises:
        TypeError: It is none.
        ValueError: Its elements are not batches.
    """
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`{name}` is a `{type(dataset).__name__}`: need a `tf.data.Dataset` of batches. Make one with "
            "`tf.data.Dataset.from_tensor_slices(...).batch(...)`, or with `from_generator`."
        )
    scalars = [spec for spec in tf.nest.flatten(dataset.element_spec) if spec.shape.rank == 0]
    if scalars:
        raise ValueError(f"`{name}` yields {scalars[0]}, which is no batch: call `.batch(batch_size)` on it.")


def joint(dataset: Any, sharding: Sharding, num_batches: int) -> Any:
    """The dataset of the batches of all workers together: those it has, or each of so many of them."""
    if sharding == "global" or num_batches == 1:
        return dataset
    grouped = dataset.ragged_batch(num_batches)
    return grouped.map(_on_element(grouped, _joined))


def part_of(dataset: Any, rank: int, num_workers: int) -> Any:
    """Of a dataset of joint batches, this rank's part of each; empty where there are fewer samples than workers."""
    return dataset.map(_on_element(dataset, lambda batch: _part(batch, rank, num_workers))).prefetch(2)


def counted_part_of(dataset: Any, rank: int, num_workers: int) -> Any:
    """The same with numbers: `(part, samples in it, samples in the joint batch)`.

    A rank without samples gets one that another rank has, and the number 0, so that it can take part in the step.
    """

    def counted(batch: Any) -> Any:
        import tensorflow as tf

        part = _part(batch, rank, num_workers)
        own, total = num_samples(part), num_samples(batch)
        shown = tf.cond(own > 0, lambda: part, lambda: tf.nest.map_structure(lambda tensor: tensor[:1], batch))
        return shown, own, total

    return dataset.map(_on_element(dataset, counted)).prefetch(2)


def without_empty(dataset: Any) -> Any:
    """Leaves out batches without samples: for evaluation, where ranks may have different numbers of batches."""
    return dataset.filter(_on_element(dataset, lambda batch: num_samples(batch) > 0))


def own_part_of(dataset: Any, num_workers: int) -> Any:
    """A dataset that is not divided, with its batches cut to the size that a strategy would give each worker."""

    def pieces(batch: Any) -> Any:
        import tensorflow as tf

        return without_empty(tf.data.Dataset.range(num_workers).map(lambda piece: _part(batch, piece, num_workers)))

    return dataset.flat_map(_on_element(dataset, pieces))


def after_samples(dataset: Any, consumed: int) -> Any:
    """The rest of a dataset of batches after so many samples; the first batch may be a piece of one."""
    import tensorflow as tf

    def cut(seen: Any, batch: Any) -> Any:
        start = tf.maximum(tf.constant(consumed, tf.int64) - seen, 0)
        return seen + num_samples(batch), tf.nest.map_structure(lambda tensor: tensor[start:], batch)

    if not consumed:
        return dataset
    return without_empty(dataset.scan(tf.constant(0, tf.int64), tf.autograph.experimental.do_not_convert(cut)))


def num_samples(batch: Any) -> Any:
    """The number of samples in a batch, as a tensor: the first dimension of its first tensor."""
    import tensorflow as tf

    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def zeros_like(dataset: Any) -> Any:
    """A dataset of the same kind with one batch of zeros."""
    import tensorflow as tf

    batch = zeros(dataset.element_spec, 1)
    return tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=dataset.element_spec)


def zeros(element_spec: Any, num_samples: int) -> Any:
    """A batch of zeros, or of empty texts, with so many samples where the number is not fixed."""
    import tensorflow as tf

    def of(part: Any) -> Any:
        shape = [num_samples if size is None else size for size in part.shape]
        return tf.fill(shape, "") if part.dtype == tf.string else tf.zeros(shape, part.dtype)

    return tf.nest.map_structure(of, element_spec)


def _on_element(dataset: Any, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """`function` as a dataset's methods want it: they hand over the parts of a tuple one by one.

    Nothing in here needs AutoGraph, which would write a file for each function.
    """
    import tensorflow as tf

    wrapped = (lambda *batch: function(batch)) if isinstance(dataset.element_spec, tuple) else function
    converted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(wrapped)
    return converted


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
    """Several batches as one, in order."""
    import tensorflow as tf

    def join(tensor: Any) -> Any:
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.merge_dims(0, 1)
        return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))

    return tf.nest.map_structure(join, batches)
