"""The position in the data, for groups of any size."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
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
    TensorDataset,
    WeightedRandomSampler,
)

from raysgd.torch._loader_process import EndsWithParent
from raysgd.torch.sampling import (
    DataSignature,
    ElasticBatchSampler,
    SampleOrder,
    SamplerOrder,
    SequentialOrder,
    ShardedLoader,
    ShuffledOrder,
    Unsharded,
    count_samples,
    shard_loader,
)

# Orders


def as_list(indices: Any) -> list[Any]:
    return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)


def test_sequential_order_is_a_range_in_every_pass() -> None:
    order = SequentialOrder(5)
    assert order.indices(seed=1, pass_index=0) == order.indices(seed=2, pass_index=7) == range(5)


def test_shuffled_order_is_a_permutation_decided_by_seed_and_pass() -> None:
    order = ShuffledOrder(50)
    first = as_list(order.indices(seed=3, pass_index=0))
    assert sorted(first) == list(range(50))
    assert as_list(ShuffledOrder(50).indices(seed=3, pass_index=0)) == first


def test_the_default_device_does_not_matter_to_a_shuffle() -> None:
    expected = as_list(ShuffledOrder(9).indices(seed=3, pass_index=0))
    with torch.device("meta"):
        assert as_list(ShuffledOrder(9).indices(seed=3, pass_index=0)) == expected


def test_neighbouring_seeds_share_no_passes() -> None:
    order = ShuffledOrder(50)
    orders = {tuple(as_list(order.indices(seed, pass_index))) for seed in range(8) for pass_index in range(8)}
    assert len(orders) == 64


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1])
def test_any_seed_of_torch_is_accepted(seed: int) -> None:
    orders: list[SampleOrder] = [ShuffledOrder(5), SamplerOrder(SubsetRandomSampler(range(5)))]
    for order in orders:
        assert sorted(as_list(order.indices(seed, 0))) == list(range(5))


@pytest.mark.parametrize("order", [SequentialOrder(0), ShuffledOrder(0), SamplerOrder([])])
def test_an_empty_dataset_has_an_empty_order(order: SampleOrder) -> None:
    assert order.num_samples == 0
    assert as_list(order.indices(seed=0, pass_index=0)) == []


class EveryGlobalSource(Sampler[int]):
    """Draws from torch's, Python's and numpy's global state."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield int(torch.randint(1000, ())) + random.randrange(1000) + int(numpy.random.randint(1000))

    def __len__(self) -> int:
        return 10


class OwnSources(Sampler[int]):
    """Draws from generators of its own, one of them in a sampler inside."""

    def __init__(self) -> None:
        self.torch_source = torch.Generator()
        self.python_source = random.Random()
        self.numpy_source = numpy.random.default_rng()
        self.old_numpy_source = numpy.random.RandomState()
        self.entropy = random.SystemRandom()  # kept, but not drawn from
        self.inner = RandomSampler(range(1000), generator=torch.Generator())
        self.parent = self

    def __iter__(self) -> Iterator[int]:
        for _, index in zip(range(10), self.inner, strict=False):
            yield (
                index
                + int(torch.randint(1000, (), generator=self.torch_source))
                + self.python_source.randrange(1000)
                + int(self.numpy_source.integers(1000))
                + int(self.old_numpy_source.randint(1000))
            )

    def __len__(self) -> int:
        return 10

    def states(self) -> list[Any]:
        return [
            self.torch_source.get_state().tolist(),
            self.python_source.getstate(),
            self.numpy_source.bit_generator.state,
            numpy_state(self.old_numpy_source),
            self.inner.generator.get_state().tolist(),
        ]


def numpy_state(source: Any) -> list[Any]:
    state = source.get_state(legacy=False)
    return [state["state"]["key"].tolist(), state["state"]["pos"]]


def global_states() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy_state(numpy.random),
        torch.initial_seed(),
    ]


@pytest.mark.parametrize("sampler_class", [EveryGlobalSource, OwnSources])
def test_what_a_sampler_draws_depends_on_seed_and_pass_alone(sampler_class: type[Any]) -> None:
    here, elsewhere = SamplerOrder(sampler_class()), SamplerOrder(sampler_class())
    first = as_list(here.indices(seed=1, pass_index=0))
    torch.rand(1), random.random(), numpy.random.rand()
    assert as_list(here.indices(seed=1, pass_index=1)) != first
    assert as_list(here.indices(seed=2, pass_index=0)) != first
    assert as_list(elsewhere.indices(seed=1, pass_index=0)) == first


def test_drawing_an_order_leaves_all_random_state_as_it_was() -> None:
    sampler = OwnSources()
    outside, inside = global_states(), sampler.states()
    orders: list[SampleOrder] = [ShuffledOrder(9), SamplerOrder(EveryGlobalSource()), SamplerOrder(sampler)]
    for order in orders:
        order.indices(seed=1, pass_index=0)
    assert global_states() == outside
    assert sampler.states() == inside


def test_a_samplers_generator_keeps_the_seed_its_user_gave() -> None:
    generator = torch.Generator().manual_seed(123)
    expected = torch.Generator().manual_seed(123).get_state()
    SamplerOrder(WeightedRandomSampler([0.5, 0.5], 4, generator=generator)).indices(seed=9, pass_index=3)
    assert generator.initial_seed() == 123
    assert torch.equal(generator.get_state(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_sampler_that_draws_on_the_gpu_is_seeded_and_restored_too() -> None:
    def draw() -> list[int]:
        sampler = WeightedRandomSampler(torch.ones(50, device="cuda"), 20)  # type: ignore[arg-type]
        return as_list(SamplerOrder(sampler).indices(seed=1, pass_index=0))

    torch.rand(1, device="cuda")
    outside = torch.cuda.get_rng_state()
    first = draw()
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    torch.rand(1, device="cuda")
    assert draw() == first


class FailsAfterDrawing(EveryGlobalSource):
    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(super().__iter__(), 3)
        raise LookupError("no such sample")


def test_random_state_is_restored_when_the_sampler_fails() -> None:
    outside = global_states()
    with pytest.raises(LookupError, match="no such sample"):
        SamplerOrder(FailsAfterDrawing()).indices(seed=1, pass_index=0)
    assert global_states() == outside


class Epochs(Sampler[int]):
    """Starts each epoch with another sample, as told by `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((index + self.epoch) % 4 for index in range(4))

    def __len__(self) -> int:
        return 4


def test_a_sampler_is_told_the_pass() -> None:
    order = SamplerOrder(Epochs())
    assert [as_list(order.indices(seed=0, pass_index=index)) for index in (0, 1)] == [
        [0, 1, 2, 3],
        [1, 2, 3, 0],
    ]


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([numpy.int64(3), torch.tensor(1), 2], [3, 1, 2]),
        (["a", "b"], ["a", "b"]),
        ([(0, 32), (1, 64)], [(0, 32), (1, 64)]),
        ([2**70, 1], [2**70, 1]),
    ],
)
def test_a_sampler_may_draw_whatever_its_dataset_takes(drawn: list[Any], expected: list[Any]) -> None:
    assert as_list(SamplerOrder(drawn).indices(seed=0, pass_index=0)) == expected


class Announces(Sampler[int]):
    """Draws 0, 1, 2, ...: `drawn` of them, or without end."""

    def __init__(self, announced: int, drawn: int | None) -> None:
        self.announced = announced
        self.drawn = drawn

    def __iter__(self) -> Iterator[int]:
        return iter(itertools.count()) if self.drawn is None else iter(range(self.drawn))

    def __len__(self) -> int:
        return self.announced


@pytest.mark.parametrize("drawn", [6, None])
def test_a_sampler_that_draws_more_than_it_announces_is_refused(drawn: int | None) -> None:
    with pytest.raises(ValueError, match=r"`Announces` draws more than the 5 samples"):
        SamplerOrder(Announces(5, drawn)).indices(seed=0, pass_index=0)


def test_a_sampler_that_draws_less_than_it_announces_makes_a_shorter_pass() -> None:
    sampler = ElasticBatchSampler(SamplerOrder(Announces(9, 5)), 2, False, True, rank=0, world_size=1)
    assert len(sampler) == 5
    assert sampler.begin_pass(0, seed=0).num_samples == 5
    assert list(sampler) == [[0, 1], [2, 3], [4]]
    assert len(sampler) == 3


# ElasticBatchSampler


def make_sampler(
    order: SampleOrder, *, batch_size: int = 2, rank: int = 0, world_size: int = 1, pad: bool = True
) -> ElasticBatchSampler:
    return ElasticBatchSampler(order, batch_size, drop_last=False, pad=pad, rank=rank, world_size=world_size)


def test_ranks_together_draw_the_batches_of_one_process() -> None:
    order = ShuffledOrder(23)
    samplers = [make_sampler(order, rank=rank, world_size=3, pad=False) for rank in range(3)]
    alone = make_sampler(order, batch_size=6)
    for sampler in (*samplers, alone):
        sampler.begin_pass(4, seed=5)
    by_step = itertools.zip_longest(*samplers, fillvalue=())
    assert [list(itertools.chain(*parts)) for parts in by_step] == list(alone)


def test_batches_are_lists_of_plain_integers() -> None:
    for order in (SequentialOrder(4), ShuffledOrder(4), SamplerOrder([3, 2, 1, 0])):
        sampler = make_sampler(order)
        sampler.begin_pass(0, seed=0)
        batches = list(sampler)
        assert len(batches) == 2
        assert all(type(batch) is list and all(type(index) is int for index in batch) for batch in batches)


def test_a_pass_resumes_in_another_group_where_it_was_left() -> None:
    order = ShuffledOrder(31)
    before = [make_sampler(order, rank=rank, world_size=4, pad=False) for rank in range(4)]
    plans = [sampler.begin_pass(2, seed=1) for sampler in before]
    used = [index for sampler in before for batch in itertools.islice(sampler, 2) for index in batch]

    after = before[:3]
    for rank, sampler in enumerate(after):
        sampler.reshape(rank, world_size=3, batch_size=3)
        plan = sampler.begin_pass(2, seed=1, consumed=plans[0].consumed_after(2))
        assert (plan.batch_size, plan.world_size, plan.consumed) == (3, 3, 16)
    used += [index for sampler in after for batch in sampler for index in batch]
    assert Counter(used) == Counter(range(31))


def test_a_newcomer_draws_the_same_order_as_a_survivor() -> None:
    survivor, newcomer = (make_sampler(SamplerOrder(EveryGlobalSource())) for _ in range(2))
    for pass_index in range(3):
        survivor.begin_pass(pass_index, seed=1)
    newcomer.begin_pass(2, seed=1, consumed=4)
    assert list(newcomer) == list(survivor)[2:]


def test_the_order_of_a_pass_is_drawn_once() -> None:
    drawn: list[tuple[int, int]] = []

    class Recorded:
        num_samples = 4
        name = "recorded"

        def indices(self, seed: int, pass_index: int) -> range:
            drawn.append((seed, pass_index))
            return range(4)

    sampler = make_sampler(Recorded())
    for pass_index, seed, consumed in [(0, 7, 0), (0, 7, 2), (1, 7, 0), (1, 8, 0)]:
        sampler.begin_pass(pass_index, seed, consumed)
    assert drawn == [(7, 0), (7, 1), (8, 1)]


def test_an_iterator_belongs_to_the_pass_it_was_started_in() -> None:
    sampler = make_sampler(ShuffledOrder(8))
    sampler.begin_pass(0, seed=0)
    expected = list(sampler)
    started, untouched = iter(sampler), iter(sampler)
    head = [next(started)]
    sampler.begin_pass(1, seed=0, consumed=6)
    sampler.reshape(rank=1, world_size=2)
    assert head + list(started) == expected
    assert list(untouched) == expected


def test_length_is_that_of_the_pass_begun_else_of_a_whole_one() -> None:
    sampler = make_sampler(SequentialOrder(10))
    assert len(sampler) == 5
    sampler.begin_pass(0, seed=0, consumed=7)
    assert len(sampler) == 2
    sampler.reshape(rank=2, world_size=3)
    assert sampler.plan is None
    assert len(sampler) == 2


def test_by_hand_ranks_divide_whole_passes_shuffled_anew() -> None:
    ranks = [make_sampler(ShuffledOrder(12), rank=rank, world_size=2) for rank in range(2)]
    passes = [[list(rank) for rank in ranks] for _ in range(2)]
    assert passes[0] != passes[1]
    for drawn in passes:
        assert sorted(itertools.chain(*itertools.chain(*drawn))) == list(range(12))


def test_by_hand_changes_nothing_about_the_passes() -> None:
    sampler, untouched = make_sampler(ShuffledOrder(9)), make_sampler(ShuffledOrder(9))
    assert len(list(sampler)) == len(sampler) == 5
    assert sampler.plan is None
    for each in (sampler, untouched):
        each.begin_pass(0, seed=7)
    assert list(sampler) == list(untouched)


@pytest.mark.parametrize(("rank", "world_size", "batch_size"), [(0, 0, None), (2, 2, None), (-1, 2, None), (0, 1, 0)])
def test_an_impossible_place_is_refused_and_changes_nothing(rank: int, world_size: int, batch_size: int | None) -> None:
    sampler = make_sampler(SequentialOrder(4))
    sampler.begin_pass(0, seed=0)
    with pytest.raises(ValueError, match="must be"):
        sampler.reshape(rank, world_size, batch_size)
    assert list(sampler) == [[0, 1], [2, 3]]


# shard_loader


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


def all_batches(loader: Any, *, world_size: int, training: bool = True, pass_index: int = 0) -> list[Any]:
    """Return what each rank loads in one pass."""
    ranks = [shard(loader, rank=rank, world_size=world_size, training=training) for rank in range(world_size)]
    for rank in ranks:
        rank.sampler.begin_pass(pass_index, seed=11)
    return [list(rank.loader) for rank in ranks]


FOUR = Squares(4)


@pytest.mark.parametrize(
    ("loader", "reason", "warn"),
    [
        ([1, 2, 3], "not a torch DataLoader", False),
        (FOUR, "not a torch DataLoader", False),
        (DataLoader(Stream(), batch_size=2), "iterable", False),
        (DataLoader(Stream(), batch_size=None), "iterable", False),
        (DataLoader(FOUR, batch_size=None), "no batches", True),
        (DataLoader(FOUR, batch_sampler=CustomBatches(range(4), 2, False)), "custom `batch_sampler`", True),
        (DataLoader(FOUR, batch_sampler=[[0, 1], [2, 3]]), "custom `batch_sampler`", True),
        (OwnIteration(FOUR), "overrides the iteration", True),
        (DataLoader(FOUR, sampler=DistributedSampler(FOUR, 2, 0)), "divides the data", False),
        (DataLoader(FOUR, sampler=HandShardedSampler()), "divides the data", False),
        (DataLoader(Endless(4), sampler=[0, 1]), "dataset has no length", True),
        (DataLoader(FOUR, sampler=NoLength()), "sampler has no length", True),
    ],
)
def test_a_loader_that_cannot_be_divided_is_left_alone(loader: Any, reason: str, warn: bool) -> None:
    left_alone = shard_loader(loader, rank=0, world_size=2, training=True)
    assert isinstance(left_alone, Unsharded)
    assert left_alone.loader is loader
    assert reason in left_alone.reason
    assert left_alone.warn is warn


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
def test_every_other_sampler_draws_the_joint_order(sampler: Any) -> None:
    sharded = shard(DataLoader(FOUR, sampler=sampler))
    assert sharded.sampler.order == SamplerOrder(sampler)
    assert sharded.num_samples == len(sampler)


def test_a_plain_batch_sampler_around_a_users_sampler_is_looked_through() -> None:
    loader = DataLoader(FOUR, batch_sampler=BatchSampler([3, 2, 1, 0], 3, drop_last=True))
    sharded = shard(loader, world_size=1)
    assert sharded.signature == DataSignature(4, 3, True, "sampler list")
    sharded.sampler.begin_pass(0, seed=0)
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
        "timeout": 7.0,
        "worker_init_fn": print,
        "generator": torch.Generator(),
        "prefetch_factor": 5,
        "persistent_workers": True,
    }
    user_loader = DataLoader(FOUR, multiprocessing_context="spawn", **options)
    rebuilt = shard(user_loader).loader
    kept = {**options, "worker_init_fn": EndsWithParent(print)}
    assert {name: getattr(rebuilt, name) for name in options} == kept
    assert rebuilt.multiprocessing_context is user_loader.multiprocessing_context
    assert rebuilt.dataset is FOUR


def test_a_memory_pinning_device_is_kept() -> None:
    assert shard(DataLoader(FOUR, pin_memory_device="cuda")).loader.pin_memory_device == "cuda"


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


def test_sequential_stays_sequential_over_the_workers() -> None:
    first, second = all_batches(DataLoader(Squares(11), batch_size=3), world_size=2)
    assert [(indices.tolist(), squares.tolist()) for indices, squares in first] == [
        ([0, 1, 2], [0, 1, 4]),
        ([6, 7, 8], [36, 49, 64]),
    ]
    assert [indices.tolist() for indices, _ in second] == [[3, 4, 5], [9, 10]]


def test_training_pads_where_evaluation_gives_no_batch() -> None:
    loader = DataLoader(Squares(5), batch_size=2)
    padded = all_batches(loader, world_size=2, training=True)
    exact = all_batches(loader, world_size=2, training=False)
    assert [[indices.tolist() for indices, _ in batches] for batches in padded] == [
        [[0, 1], [4]],
        [[2, 3], [4]],
    ]
    assert [[indices.tolist() for indices, _ in batches] for batches in exact] == [[[0, 1], [4]], [[2, 3]]]


@pytest.mark.parametrize("training", [True, False])
def test_drop_last_leaves_out_a_short_joint_batch(training: bool) -> None:
    loader = DataLoader(Squares(7), batch_size=2, drop_last=True)
    batches = all_batches(loader, world_size=2, training=training)
    assert [[indices.tolist() for indices, _ in of_rank] for of_rank in batches] == [[[0, 1]], [[2, 3]]]


def test_a_shuffled_loader_divides_a_new_permutation_in_each_pass() -> None:
    loader = DataLoader(Squares(40), batch_size=4, shuffle=True)
    passes = []
    for pass_index in (0, 1):
        batches = all_batches(loader, world_size=3, training=False, pass_index=pass_index)
        passes.append([index for of_rank in batches for indices, _ in of_rank for index in indices.tolist()])
        assert sorted(passes[-1]) == list(range(40))
    assert passes[0] != passes[1]


def test_weighted_sampling_draws_one_joint_order_on_all_ranks() -> None:
    def load(rank: int, world_size: int) -> list[list[int]]:
        # Everything is built anew and from another random state, as in separate processes.
        torch.manual_seed(rank)
        sampler = WeightedRandomSampler([float(weight) for weight in range(1, 31)], num_samples=20)
        loader = DataLoader(Squares(30), batch_size=20 // world_size, sampler=sampler)
        sharded = shard(loader, rank=rank, world_size=world_size)
        sharded.sampler.begin_pass(3, seed=4)
        return [indices.tolist() for indices, _ in sharded.loader]

    (alone,) = load(0, 1)
    assert load(0, 2) + load(1, 2) == [alone[:10], alone[10:]]


def test_a_custom_collate_function_sees_the_shares() -> None:
    loader = DataLoader(Squares(6), batch_size=2, collate_fn=lambda samples: [index for index, _ in samples])
    assert all_batches(loader, world_size=2) == [[[0, 1], [4]], [[2, 3], [5]]]


def test_an_empty_dataset_divides_into_nothing() -> None:
    sharded = shard(DataLoader(Squares(0), batch_size=2))
    assert sharded.sampler.begin_pass(0, seed=0).num_steps == 0
    assert list(sharded.loader) == []
    assert len(sharded.loader) == 0


def test_loader_processes_that_read_ahead_do_not_disturb_the_position() -> None:
    loader = DataLoader(
        Squares(30), batch_size=2, shuffle=True, num_workers=2, prefetch_factor=3, persistent_workers=True
    )
    sharded = shard(loader, rank=0, world_size=2)
    order = as_list(ShuffledOrder(30).indices(seed=1, pass_index=0))

    plan = sharded.sampler.begin_pass(0, seed=1)
    assert len(sharded.loader) == 8
    head = [indices.tolist() for indices, _ in itertools.islice(sharded.loader, 2)]
    assert head == [order[0:2], order[4:6]]

    # The other rank is lost with batches in flight here; the rest of the pass is ours alone.
    sharded.sampler.reshape(rank=0, world_size=1)
    plan = sharded.sampler.begin_pass(0, seed=1, consumed=plan.consumed_after(2))
    rest = [indices.tolist() for indices, _ in sharded.loader]
    assert rest == [order[at : at + 2] for at in range(8, 30, 2)]
    assert len(rest) == plan.num_batches(0)

    # And the same loader processes go on with the next pass.
    sharded.sampler.begin_pass(1, seed=1)
    next_order = as_list(ShuffledOrder(30).indices(seed=1, pass_index=1))
    assert [index for indices, _ in sharded.loader for index in indices.tolist()] == next_order


def test_weighted_gradients_of_the_ranks_average_to_that_of_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(10, 3, generator=generator, dtype=torch.float64),
        torch.randn(10, 1, generator=generator, dtype=torch.float64),
    )

    def gradients(batch_size: int, rank: int, world_size: int) -> list[torch.Tensor]:
        sharded = shard(DataLoader(dataset, batch_size=batch_size), rank=rank, world_size=world_size)
        plan = sharded.sampler.begin_pass(0, seed=0)
        result = []
        for step, (features, target) in enumerate(sharded.loader):
            weights = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
            torch.nn.functional.mse_loss(features @ weights, target).backward()
            assert weights.grad is not None
            result.append(plan.share(step, rank).weight * weights.grad)
        return result

    of_ranks = [gradients(2, rank, world_size=3) for rank in range(3)]
    averaged = [torch.stack(parts).mean(dim=0) for parts in zip(*of_ranks, strict=True)]
    alone = gradients(6, rank=0, world_size=1)
    assert len(averaged) == len(alone) == 2
    for ours, expected in zip(averaged, alone, strict=True):
        torch.testing.assert_close(ours, expected)


# count_samples


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 3), 5),
        (torch.zeros(0, 3), 0),
        ((torch.zeros(2, 3), torch.zeros(4)), 4),
        ([torch.zeros(2, 3), torch.zeros(4)], 4),
        ((torch.zeros(6, 3), torch.tensor(1.0)), 6),
        ((torch.zeros(6, 3), ["a", "b"]), 6),
        (([torch.zeros(7, 2), torch.zeros(7)], torch.zeros(3)), 3),
        ({"input_ids": torch.zeros(8, 16), "labels": torch.zeros(8)}, 8),
        ({"meta": "x", "nested": {"image": [torch.zeros(9, 3)]}}, 9),
        (({"a": torch.zeros(3)}, {"b": torch.zeros(5)}), 3),
        ((numpy.zeros((4, 2)), numpy.zeros(4)), 4),
        (["some", "raw", "texts"], 3),
        (
            (
                (torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)),
                ({"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}),
            ),
            2,
        ),
        ((torch.zeros(1, 3, 8, 8), [{"boxes": torch.zeros(5, 4)}]), 1),
        (([{"boxes": torch.zeros(5, 4)}],), 1),
        ([{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}], 2),
        ({"labels": [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}], "pixels": torch.zeros(2, 3)}, 2),
        ([{"input_ids": torch.zeros(8, 16)}], 8),
        ([], 0),
        ({}, 1),
        (torch.tensor(3.0), 1),
        ("text", 1),
        (None, 1),
        (17, 1),
    ],
)
def test_samples_are_counted_in_batches_of_any_structure(batch: Any, expected: int) -> None:
    assert count_samples(batch) == expected


@pytest.mark.parametrize(("asked", "wanted"), [(False, False), (False, True), (True, False)])
def test_batches_are_pinned_where_the_loader_or_the_library_wants_it(asked: bool, wanted: bool) -> None:
    loader = DataLoader(range(4), pin_memory=asked)
    sharded = shard_loader(loader, rank=0, world_size=1, training=True, pin_memory=wanted)
    assert sharded.loader.pin_memory == (asked or wanted)
