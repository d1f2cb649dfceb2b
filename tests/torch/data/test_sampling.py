"""Loaders that are divided over the workers, and those that are left alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from raysgd.torch.data.sample_order import SampleOrder, SamplerOrder, SequentialOrder, ShuffledOrder
from raysgd.torch.data.sampling import GlobalBatchRule, ShardedLoader, UndividedLoader, shard_loader
from tests.torch.samplers import Epochs


class Squares(Dataset[tuple[int, int]]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2

    def __len__(self) -> int:
        return self.num_samples


class Endless(Squares):
    __len__ = None  # type: ignore[assignment]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class NoLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class CustomBatches(BatchSampler):
    pass


class HandShardedSampler(Sampler[int]):
    """Divides the data itself, in torch's words but not of torch's class."""

    num_replicas = 2
    rank = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def __len__(self) -> int:
        return 2


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


class RenamedLoader(DataLoader[Any]):
    """Changes nothing about iteration."""


def shard(loader: Any, *, rank: int = 0, world_size: int = 2, training: bool = True) -> ShardedLoader:
    sharded = shard_loader(loader, rank=rank, world_size=world_size, training=training)
    assert isinstance(sharded, ShardedLoader)
    return sharded


FOUR = Squares(4)


@pytest.mark.parametrize(
    ("loader", "reason", "warn"),
    [
        ([1, 2, 3], "not a torch DataLoader", False),
        (FOUR, "not a torch DataLoader", False),
        (DataLoader(Stream(), batch_size=2), "iterable", False),
        (DataLoader(Stream(), batch_size=None), "iterable", False),
        (DataLoader(FOUR, batch_size=None), "no batches", True),
        (OwnIteration(FOUR), "overrides the iteration", True),
        (DataLoader(FOUR, sampler=DistributedSampler(FOUR, 2, 0)), "shards the data", False),
        (DataLoader(FOUR, sampler=HandShardedSampler()), "shards the data", False),
        (DataLoader(Endless(4), sampler=[0, 1]), "dataset has no length", True),
        (DataLoader(FOUR, sampler=NoLength()), "sampler has no length", True),
    ],
)
def test_a_loader_that_cannot_be_divided_is_left_alone(loader: Any, reason: str, warn: bool) -> None:
    left_alone = shard_loader(loader, rank=0, world_size=2, training=True)
    assert isinstance(left_alone, UndividedLoader)
    assert left_alone.loader is loader
    assert reason in left_alone.reason
    assert left_alone.warn is warn


@pytest.mark.parametrize("rule", [None, GlobalBatchRule(num_shards=4, multiple=4), GlobalBatchRule(num_shards=4)])
@pytest.mark.parametrize("training", [True, False])
def test_batches_of_a_batch_sampler_are_not_divided_where_their_sizes_must_be_known(
    rule: GlobalBatchRule | None, training: bool
) -> None:
    loader = DataLoader(FOUR, batch_sampler=CustomBatches(range(4), 2, False))
    left_alone = shard_loader(loader, rank=0, world_size=2, training=training, rule=rule)
    assert isinstance(left_alone, UndividedLoader)
    assert "custom `batch_sampler`, which only `split_batches=True` shards" in left_alone.reason
    assert left_alone.warn


@pytest.mark.parametrize("training", [True, False])
def test_each_batch_of_a_batch_sampler_is_a_global_batch_where_these_stay(training: bool) -> None:
    loader = DataLoader(Squares(9), batch_sampler=[[8, 7, 6, 5, 4], [3], [2, 1]])
    found = []
    for rank in range(2):
        ranked = shard_loader(loader, rank=rank, world_size=2, training=training, rule=GlobalBatchRule())
        assert isinstance(ranked, ShardedLoader)
        assert len(ranked.sampler) == 3
        plan = ranked.sampler.plan_pass(0, seed=0)
        assert [plan.consumed_after(steps) for steps in range(4)] == [0, 5, 6, 8]
        found.append(list(ranked.sampler))
        ranked.sampler.plan_pass(0, seed=0, consumed=5)
        assert list(ranked.sampler) == found[-1][1:]
    assert found == [[[8, 7, 6], [3], [2, 1]], [[5, 4], [3], [2, 1]] if training else [[5, 4]]]


def test_batches_of_one_sample_may_be_tensors() -> None:
    loader = DataLoader(Squares(3), batch_sampler=torch.tensor([2, 0, 1]).split(1))
    sharded = shard_loader(loader, rank=0, world_size=1, training=True, rule=GlobalBatchRule())
    assert isinstance(sharded, ShardedLoader)
    sharded.sampler.plan_pass(0, seed=0)
    assert [batch.tolist() for batch, _ in sharded.loader] == [[2], [0], [1]]


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(FOUR), SequentialOrder(4)),
        (RenamedLoader(FOUR), SequentialOrder(4)),
        (DataLoader(FOUR, sampler=SequentialSampler(range(3))), SequentialOrder(3)),
        (DataLoader(FOUR, shuffle=True), ShuffledOrder(4)),
        (DataLoader(FOUR, batch_sampler=BatchSampler(RandomSampler(FOUR), 2, True)), ShuffledOrder(4)),
    ],
)
def test_torchs_own_orders_are_recognised(loader: Any, order: SampleOrder) -> None:
    assert shard(loader).sampler.order == order


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(FOUR, replacement=True),
        RandomSampler(FOUR, num_samples=3),
        SubsetRandomSampler([0, 2]),
        WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], num_samples=9),
        Epochs(),
        [3, 1],
    ],
)
def test_every_other_sampler_draws_the_global_order(sampler: Any) -> None:
    sharded = shard(DataLoader(FOUR, sampler=sampler))
    assert sharded.sampler.order == SamplerOrder(sampler)
    assert sharded.num_samples == len(sampler)


def test_a_plain_batch_sampler_around_a_users_sampler_is_looked_through() -> None:
    loader = DataLoader(FOUR, batch_sampler=BatchSampler([3, 2, 1, 0], 3, drop_last=True))
    sharded = shard(loader, world_size=1)
    assert sharded.signature == "4 samples, sampler list, batch_size=3, drop_last=True"
    sharded.sampler.plan_pass(0, seed=0)
    assert [indices.tolist() for indices, _ in sharded.loader] == [[3, 2, 1]]


def test_signatures_are_equal_for_the_same_data_and_differ_otherwise() -> None:
    loaders = [
        DataLoader(FOUR, batch_size=2),
        DataLoader(FOUR, batch_size=1),
        DataLoader(FOUR, batch_size=2, drop_last=True),
        DataLoader(FOUR, batch_size=2, shuffle=True),
        DataLoader(FOUR, batch_size=2, sampler=Epochs()),
        DataLoader(Squares(5), batch_size=2),
    ]
    signatures = [shard(loader, rank=0).signature for loader in loaders]
    assert signatures == [shard(loader, rank=1).signature for loader in loaders]
    assert len(set(signatures)) == len(loaders)


def test_all_loading_options_are_kept() -> None:
    options: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": list,
        "pin_memory": True,
        "pin_memory_device": "cuda",
        "timeout": 7.0,
        "worker_init_fn": print,
        "prefetch_factor": 5,
        "persistent_workers": True,
    }
    user_loader = DataLoader(FOUR, multiprocessing_context="spawn", **options)
    rebuilt = shard(user_loader).loader
    worker_init_fn: Any = rebuilt.worker_init_fn
    assert worker_init_fn.args == (options.pop("worker_init_fn"),)
    assert {name: getattr(rebuilt, name) for name in options} == options
    assert rebuilt.multiprocessing_context is user_loader.multiprocessing_context
    assert rebuilt.dataset is FOUR


@pytest.mark.skipif(not hasattr(DataLoader(FOUR), "in_order"), reason="this torch always delivers in order")
def test_batches_arrive_in_order_even_if_the_user_did_not_mind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert shard(DataLoader(FOUR)).loader.in_order
        assert not caplog.records
        assert shard(DataLoader(FOUR, in_order=False)).loader.in_order
    assert "`in_order=False` has no effect" in caplog.text


def test_the_users_seed_is_taken_as_a_hint() -> None:
    loader_generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(FOUR, generator=torch.Generator().manual_seed(6))
    assert shard(DataLoader(FOUR, shuffle=True, generator=loader_generator)).seed_hint == 5
    assert shard(DataLoader(FOUR, sampler=sampler)).seed_hint == 6
    assert shard(DataLoader(FOUR, sampler=sampler, generator=loader_generator)).seed_hint == 5
    assert shard(DataLoader(FOUR)).seed_hint == torch.initial_seed()
    batches = CustomBatches(range(4), 2, False)
    batches.generator = torch.Generator().manual_seed(7)  # type: ignore[attr-defined]
    loader = DataLoader(FOUR, batch_sampler=batches)
    divided = shard_loader(loader, rank=0, world_size=1, training=True, rule=GlobalBatchRule())
    assert isinstance(divided, ShardedLoader)
    assert divided.seed_hint == 7


def test_loader_processes_that_read_ahead_do_not_disturb_the_position() -> None:
    loader = DataLoader(
        Squares(30), batch_size=2, shuffle=True, num_workers=2, prefetch_factor=3, persistent_workers=True
    )
    sharded = shard(loader, rank=0, world_size=2)
    order = list(ShuffledOrder(30).indices(seed=1, pass_index=0))

    plan = sharded.sampler.plan_pass(0, seed=1)
    assert len(sharded.loader) == 8
    head = [indices.tolist() for indices, _ in itertools.islice(sharded.loader, 2)]
    assert head == [order[0:2], order[4:6]]

    # The other rank is lost with batches in flight here; the rest of the pass is ours alone.
    sharded.sampler.reshape(rank=0, world_size=1)
    plan = sharded.sampler.plan_pass(0, seed=1, consumed=plan.consumed_after(2))
    rest = [indices.tolist() for indices, _ in sharded.loader]
    assert rest == [order[at : at + 2] for at in range(8, 30, 2)]
    assert len(rest) == plan.num_batches(0)

    # And the same loader processes go on with the next pass.
    sharded.sampler.plan_pass(1, seed=1)
    next_order = list(ShuffledOrder(30).indices(seed=1, pass_index=1))
    assert [index for indices, _ in sharded.loader for index in indices.tolist()] == next_order


@pytest.mark.parametrize(("asked", "wanted"), [(False, False), (False, True), (True, False)])
def test_batches_are_pinned_where_the_loader_or_the_library_wants_it(asked: bool, wanted: bool) -> None:
    loader = DataLoader(range(4), pin_memory=asked)
    sharded = shard_loader(loader, rank=0, world_size=1, training=True, pin_memory=wanted)
    assert sharded.loader.pin_memory == (asked or wanted)
