"""Streams as the data of operators of TensorFlow: batches of tensors, and a `tf.data.Dataset` that says their form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raysgd.arrays.division import Division
from raysgd.connections.group import Group
from raysgd.engine.shared.types import World
from raysgd.streams.joint_reader import Numbers, StartSum
from raysgd.streams.source import BatchesInOrder, StreamData, StreamSource, check_batched, stream_data
from raysgd.streams.stream import Stream
from raysgd.tf.data.batch_streams import StreamItem
from raysgd.tf.data.ray_dataset import array_collate, spec_of
from raysgd.worker.data.batch_streams import NO_BATCH


@dataclass(frozen=True)
class TFRanks:
    """The replicas of a group, which add up numbers between two steps.

    Attributes:
        rank: The place of this replica.
        world_size: The number of replicas.
        group: What they exchange numbers through.
    """

    rank: int
    world_size: int
    group: Group

    def adding(self) -> StartSum:
        """Return what adds up: at once, in the order of all exchanges of the group."""

        def start(numbers: Numbers) -> Callable[[], Numbers]:
            self.group.add_up(numbers)
            return lambda: numbers

        return start


def data_of(stream: Stream, name: str, world: World) -> StreamData:
    """Look at the shards of a stream, under "train" or "validation"."""
    return stream_data(stream, name, Division, world.size)


def source_of(data: StreamData, ranks: TFRanks, seed: int) -> StreamSource:
    """Return the source of the batches of a replica."""
    return StreamSource(data, ranks, seed, array_collate(), _item, NO_BATCH)


def _item(batch: Any, weight: float, num_samples: int, num_joint: int, *place: Any) -> StreamItem:
    import tensorflow as tf

    tensors = batch if batch is NO_BATCH else tf.nest.map_structure(tf.convert_to_tensor, batch)
    return StreamItem(tensors, num_samples, num_joint)


def dataset_of(stream: Stream) -> Any:
    """Return the batches of a stream as a `tf.data.Dataset`, in the order of its shards. Looks at the first row."""
    import tensorflow as tf

    in_order = replace(check_batched(stream, "a stream"), buffer=1)
    collate = array_collate()
    first = next(iter(BatchesInOrder(in_order, lambda own: 1, collate)), None)
    if first is None:
        raise ValueError("the stream has no rows.")
    signature = tf.nest.map_structure(spec_of, first)
    batches = BatchesInOrder(in_order, lambda own: own or 1, collate)
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
