"""A pass over a billion samples: its loader is opened, moved to the half, and read to the end, in little memory."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from raysgd.torch.data.sample_order import ShuffledOrder
from raysgd.torch.data.sampling import ShardedLoader, shard_loader

NUM_SAMPLES = 10**9
HALF = NUM_SAMPLES // 2
BATCH_SIZE = 64


class Numbers(Dataset[int]):
    """Each sample is its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(rank: int, world_size: int) -> ShardedLoader:
    loader = DataLoader(Numbers(), batch_size=BATCH_SIZE, shuffle=True)
    sharded = shard_loader(loader, rank=rank, world_size=world_size, training=True)
    assert isinstance(sharded, ShardedLoader)
    return sharded


def read(ranks: list[ShardedLoader], consumed: int, most: int | None = None) -> list[int]:
    """What all ranks load of pass 1 from there on, step by step."""
    for rank in ranks:
        rank.sampler.plan_pass(1, seed=5, consumed=consumed)
    steps: Any = zip(*[rank.loader for rank in ranks], strict=True)
    return torch.cat([batch for step in itertools.islice(steps, most) for batch in step]).tolist()


def test_a_loader_over_a_billion_samples_is_opened_in_the_middle_and_read_to_the_end() -> None:
    tracemalloc.start()
    try:
        ranks = [loader_of(rank, world_size=3) for rank in range(3)]
        first, middle = read(ranks, 0, most=2), read(ranks, HALF, most=2)
        end = read(ranks, NUM_SAMPLES - 1000)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    order = ShuffledOrder(NUM_SAMPLES).indices(5, 1)
    assert first == order[: len(first)]
    assert middle == order[HALF : HALF + len(middle)]
    assert sorted(set(end)) == sorted(order[NUM_SAMPLES - 1000 :])
    assert len(first) == len(middle) == 2 * 3 * BATCH_SIZE
    assert most_bytes < 2**23
