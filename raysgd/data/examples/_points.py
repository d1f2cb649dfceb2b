"""The data of the examples that learn the identity function: numbers that are both inputs and labels."""

from __future__ import annotations

from raysgd.util.data import MLDataset, from_parallel_iter
from raysgd.util.iter import from_items

NUM_POINTS = 32 * 200
POINTS = [index / NUM_POINTS for index in range(NUM_POINTS)]


def dataset_creator(num_shards: int) -> MLDataset:
    """Return the numbers as an `MLDataset` of data frames. Column 0 is the input, column 1 is the label."""
    pairs = from_items(POINTS, num_shards).for_each(lambda point: [point, point])
    return from_parallel_iter(pairs, need_convert=True, batch_size=32)
