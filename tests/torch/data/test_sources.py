"""The position in the data of one replica: batches across calls and passes.

Covers `raysgd.torch.data.feed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, default_collate

from raysgd.core.arrays.division import BatchPlan
from raysgd.core.connections.torch import end_process_group
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.torch.data.feed import (
    DividedLoaderSource,
    LoaderSource,
    PlainSource,
    RankSums,
    TorchFeed,
    tell_epoch,
)
from raysgd.torch.data.sample_order import length_of
from raysgd.torch.data.sampling import ShardedLoader, shard_loader
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.trainer.worker.feed import DataCursor
from raysgd.trainer.worker.step_loop import StepLoop, StepParts

SEED = 7


class Passes:
    """Counts passes as a runner does."""

    def __init__(self) -> None:
        self.num_begun = 0

    def __call__(self) -> int:
        self.num_begun += 1
        return self.num_begun - 1


class OneShot:
    """An iterable of unknown length that notes how often it was opened."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.num_opened = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_opened += 1
        yield from self.items


def divided(
    num_samples: int = 10,
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    rank: int = 0,
    world_size: int = 1,
    training: bool = True,
) -> ShardedLoader:
    loader = DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, shuffle=shuffle)
    sharded = shard_loader(loader, rank=rank, world_size=world_size, training=training)
    assert isinstance(sharded, ShardedLoader)
    return sharded


def plain_source(num_samples: int) -> LoaderSource:
    return PlainSource(list(range(num_samples)))


def one_shot_source(num_samples: int) -> LoaderSource:
    return PlainSource(OneShot(list(range(num_samples))))


def divided_source(num_samples: int) -> LoaderSource:
    return DividedLoaderSource(divided(num_samples), SEED)


def lockstep_source(num_samples: int) -> LoaderSource:
    return in_lockstep([torch.tensor([i]) for i in range(num_samples)])


def in_lockstep(batches: Any) -> PlainSource:
    source = PlainSource(batches, is_in_lockstep=True)
    source.join(RankSums(DDP()))
    return source


def make_stream(source: LoaderSource) -> tuple[DataCursor, Passes]:
    passes = Passes()
    return DataCursor(source, passes), passes


def take(
    cursor: DataCursor, num_steps: int | None, committed: Callable[[bool], None] = lambda is_last: None
) -> Iterator[Any]:
    """The batches of so many steps."""
    return StepLoop(
        cursor, StepParts(TorchFeed(lambda name: None, Strategy(), 1), Leg()), num_steps, committed
    ).batches()


def planned(cursor: DataCursor) -> Iterator[tuple[Any, BatchPlan]]:
    """The batches of a pass, and how each counts."""
    parts = StepParts(TorchFeed(lambda name: None, Strategy(), 1), Leg())
    for batch in StepLoop(cursor, parts, None).batches():
        yield batch, parts.leg.plan


def numbers(batches: Any) -> list[Any]:
    """The items of the batches, without tensors and lists of one."""
    return [_bare(batch) for batch in batches]


def _bare(batch: Any) -> Any:
    batch = batch[0] if isinstance(batch, list | tuple) else batch
    if not isinstance(batch, torch.Tensor):
        return batch
    return batch.item() if batch.numel() == 1 else batch.tolist()


@pytest.fixture(
    params=[plain_source, one_shot_source, divided_source, lockstep_source],
    ids=["plain", "one shot", "divided", "lockstep"],
)
def make_source(request: pytest.FixtureRequest) -> Iterator[Callable[[int], LoaderSource]]:
    if request.param is lockstep_source:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    end_process_group()


# ------------------------------------------------------------------------------------------------ every source


def test_calls_go_on_where_the_last_one_stopped(make_source: Callable[[int], LoaderSource]) -> None:
    stream, passes = make_stream(make_source(10))
    found = []
    for num_steps in (None, 5, 3, 5, None):
        found.append((numbers(take(stream, num_steps)), passes.num_begun))
    assert found == [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1),
        ([0, 1, 2, 3, 4], 2),
        ([5, 6, 7], 2),
        ([8, 9, 0, 1, 2], 3),
        ([3, 4, 5, 6, 7, 8, 9], 3),
    ]


@pytest.mark.parametrize("num_steps", [10, None])
def test_a_call_that_ends_with_the_pass_does_not_make_the_next_one_empty(
    make_source: Callable[[int], LoaderSource], num_steps: int | None
) -> None:
    stream, passes = make_stream(make_source(10))
    for index in range(3):
        assert len(list(take(stream, 10 if index % 2 else num_steps))) == 10
        assert passes.num_begun == index + 1


@pytest.mark.parametrize("num_steps", [None, 1, 5])
def test_an_empty_source_ends_the_iteration_every_time(
    make_source: Callable[[int], LoaderSource], num_steps: int | None
) -> None:
    stream, _ = make_stream(make_source(0))
    for _ in range(2):
        assert list(take(stream, num_steps)) == []
    assert stream.num_batches_taken == 0


def test_no_steps_yield_nothing_and_lose_nothing(make_source: Callable[[int], LoaderSource]) -> None:
    stream, _ = make_stream(make_source(3))
    assert list(take(stream, 0)) == []
    assert numbers(take(stream, 1)) == [0]
    assert list(take(stream, 0)) == []
    assert numbers(take(stream, None)) == [1, 2]


def test_a_caller_that_breaks_off_loses_only_the_batch_it_holds(make_source: Callable[[int], LoaderSource]) -> None:
    stream, _ = make_stream(make_source(5))
    for batch in take(stream, None):
        if _bare(batch) == 1:
            break
    assert numbers(take(stream, None)) == [2, 3, 4]


# ------------------------------------------------------------------------------------------------ plain sources


class TellsEpoch:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class LoaderWith:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


@pytest.mark.parametrize("attribute", ["sampler", "batch_sampler"])
def test_a_sampler_of_the_users_own_is_told_each_pass(attribute: str) -> None:
    sampler = TellsEpoch()
    stream, _ = make_stream(PlainSource(LoaderWith(**{attribute: sampler})))
    list(take(stream, 5))
    assert sampler.epochs == [0, 1, 2]


def test_of_two_samplers_one_is_told() -> None:
    first, second = TellsEpoch(), TellsEpoch()
    tell_epoch(LoaderWith(sampler=first, batch_sampler=second), 3)
    assert (first.epochs, second.epochs) == ([3], [])


def test_a_loader_is_opened_once_for_each_pass() -> None:
    loader = OneShot([1, 2, 3])
    stream, _ = make_stream(PlainSource(loader))
    list(take(stream, 2)), list(take(stream, 2)), list(take(stream, 2))
    assert loader.num_opened == 2


@pytest.mark.parametrize(("loader", "length"), [([1, 2], 2), (iter([1]), None), (OneShot([1]), None)])
def test_a_length_that_is_not_there_is_none(loader: Any, length: int | None) -> None:
    assert length_of(loader) == length
    assert PlainSource(loader).num_steps() == length


# ------------------------------------------------------------------------------------------------ divided loaders


def test_each_batch_comes_with_its_share_of_the_step() -> None:
    stream = DataCursor(DividedLoaderSource(divided(7, batch_size=2, world_size=2), SEED), Passes())
    shares = [(_bare(batch), plan.weight, plan.num_samples) for batch, plan in planned(stream)]
    assert shares == [([0, 1], 1.0, 2), ([4, 5], 2 * 2 / 3, 2)]
    second = DataCursor(DividedLoaderSource(divided(7, batch_size=2, rank=1, world_size=2), SEED), Passes())
    shares = [(_bare(batch), plan.weight, plan.num_samples) for batch, plan in planned(second)]
    assert shares == [([2, 3], 1.0, 2), (6, 2 / 3, 1)]


def test_a_rank_without_samples_in_the_last_step_knows_that_its_batch_is_padding() -> None:
    stream = DataCursor(DividedLoaderSource(divided(3, rank=1, world_size=2), SEED), Passes())
    assert [(plan.weight, plan.is_padding) for _, plan in planned(stream)] == [(1.0, False), (0.0, True)]


def test_a_batch_counts_by_the_samples_that_were_drawn_whatever_a_collator_returns() -> None:
    data = TensorDataset(torch.arange(7))
    loader = DataLoader(data, batch_size=4, collate_fn=lambda samples: default_collate(samples[1:]))
    sharded = shard_loader(loader, rank=0, world_size=1, training=True)
    assert isinstance(sharded, ShardedLoader)
    stream = DataCursor(DividedLoaderSource(sharded, SEED), Passes())
    assert [(len(batch[0]), plan.num_samples) for batch, plan in planned(stream)] == [(3, 4), (2, 3)]


class Growing(torch.utils.data.Dataset[int]):
    """Has as many samples as it is told."""

    def __init__(self) -> None:
        self.num_samples = 4

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class InTurn(torch.utils.data.Sampler[int]):
    """A sampler of a user, which reads the length in each pass."""

    def __init__(self, data: Growing) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("now", [3, 6])
def test_data_that_change_their_size_between_two_passes_are_refused(shuffle: bool, training: bool, now: int) -> None:
    data = Growing()
    sharded = shard_loader(DataLoader(data, 2, shuffle=shuffle), rank=0, world_size=1, training=training)
    assert isinstance(sharded, ShardedLoader)
    stream, _ = make_stream(DividedLoaderSource(sharded, SEED))
    assert len(list(take(stream, None))) == 2
    data.num_samples = now
    with pytest.raises(ValueError, match=rf"have {now} samples, and had 4 .*`train\(dataset=...\)`; or a `sampler`"):
        list(take(stream, None))


def test_a_sampler_of_a_user_follows_data_that_change_their_size() -> None:
    data = Growing()
    sharded = shard_loader(DataLoader(data, 2, sampler=InTurn(data)), rank=0, world_size=1, training=True)
    assert isinstance(sharded, ShardedLoader)
    stream, _ = make_stream(DividedLoaderSource(sharded, SEED))
    found = []
    for data.num_samples in (4, 6, 3):
        found.append([len(batch) for batch in take(stream, None)])
    assert found == [[2, 2], [2, 2, 2], [2, 1]]


def test_in_an_evaluation_ranks_count_global_steps_also_where_one_has_no_sample() -> None:
    calls = (1, 1, None, 3, None, None)
    found = []
    for rank in range(2):
        source = DividedLoaderSource(divided(5, batch_size=2, rank=rank, world_size=2, training=False), SEED)
        stream, passes = make_stream(source)
        found.append(([numbers(take(stream, num_steps)) for num_steps in calls], passes.num_begun, source.num_steps()))
    assert found[0] == ([[[0, 1]], [4], [[0, 1], 4], [[0, 1], 4, [0, 1]], [4], [[0, 1], 4]], 5, 2)
    assert found[1] == ([[[2, 3]], [], [[2, 3]], [[2, 3], [2, 3]], [], [[2, 3]]], 5, 2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_is_resumed_where_another_stream_left_it(shuffle: bool) -> None:
    first, _ = make_stream(DividedLoaderSource(divided(10, shuffle=shuffle), SEED))
    begun = numbers(take(first, 14))
    second, passes = make_stream(DividedLoaderSource(divided(10, shuffle=shuffle), SEED))
    second.resume(first.pass_index, first.completed)
    assert (second.is_mid_pass, second.completed) == (True, 4)
    rest = numbers(take(second, None))
    assert sorted(begun[10:] + rest) == list(range(10))
    assert rest == numbers(take(first, None))
    assert passes.num_begun == 0, "it is the same pass"


# ------------------------------------------------------------------------------------------------ breaking off


def taken(stream: DataCursor, num_batches: int, num_steps: int | None = None) -> list[Any]:
    """Takes so many batches and leaves the last one in flight."""
    batches = take(stream, num_steps)
    return [_bare(next(batches)) for _ in range(num_batches)]


def test_a_step_is_completed_when_the_batch_after_it_is_asked_for() -> None:
    stream, _ = make_stream(divided_source(10))
    counts = []
    for _ in take(stream, 3):
        counts.append((stream.num_batches_taken, stream.num_batches_completed))
    assert counts == [(1, 0), (2, 1), (3, 2)]
    assert stream.num_batches_completed == 3


@pytest.mark.parametrize("num_batches", [1, 4, 9, 10])
def test_the_batch_of_a_step_that_broke_off_is_handed_out_again(num_batches: int) -> None:
    stream, passes = make_stream(divided_source(10))
    seen = taken(stream, num_batches)
    for _ in range(2):  # a second time changes nothing
        stream.break_off()
    assert (stream.num_batches_taken, stream.num_batches_completed) == (num_batches - 1, num_batches - 1)
    assert (stream.is_mid_pass, stream.completed) == (True, num_batches - 1)
    assert seen[:-1] + numbers(take(stream, None)) == list(range(10))
    assert passes.num_begun == 1, "it is the same pass"


def test_breaking_off_between_two_steps_loses_nothing() -> None:
    stream, _ = make_stream(divided_source(10))
    list(take(stream, 4))
    stream.break_off()
    assert (stream.completed, stream.num_batches_taken) == (4, 4)
    assert numbers(take(stream, None)) == [4, 5, 6, 7, 8, 9]


def test_breaking_off_between_two_passes_begins_the_next_one() -> None:
    stream, passes = make_stream(divided_source(3))
    stream.break_off()
    assert numbers(take(stream, 3)) == [0, 1, 2]
    stream.break_off()
    assert not stream.is_mid_pass
    assert numbers(take(stream, None)) == [0, 1, 2]
    assert passes.num_begun == 2


def test_breaking_off_in_the_second_pass_of_a_call_keeps_that_pass() -> None:
    stream, passes = make_stream(divided_source(3))
    assert taken(stream, 5, num_steps=7) == [0, 1, 2, 0, 1]
    stream.break_off()
    assert (stream.pass_index, stream.completed) == (1, 1)
    assert numbers(take(stream, 3)) == [1, 2, 0]
    assert passes.num_begun == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_was_in_flight_is_divided_among_those_who_go_on(shuffle: bool) -> None:
    """Three ranks, the second of which is lost in the third step; the others go on with what is left."""
    loaders = [divided(20, batch_size=2, shuffle=shuffle, rank=rank, world_size=3) for rank in range(3)]
    streams = [make_stream(DividedLoaderSource(loader, SEED))[0] for loader in loaders]
    seen = [number for stream in streams for batch in taken(stream, 3)[:2] for number in batch]
    assert [stream.samples_used() for stream in streams] == [SamplesUsed(0, 20, 12, 6)] * 3
    for rank, index in enumerate((0, 2)):
        streams[index].break_off()
        loaders[index].sampler.reshape(rank, 2, None)
        for batch in take(streams[index], None):
            seen += batch[0].tolist()
    assert sorted(seen) == list(range(20)), "each sample once"


def test_the_ledger_says_what_is_due_used_and_in_flight() -> None:
    stream, _ = make_stream(DividedLoaderSource(divided(11, batch_size=2, world_size=2), SEED))
    batches = take(stream, None)
    ledgers = []
    for _ in batches:
        ledgers.append(stream.samples_used())
    assert ledgers == [SamplesUsed(0, 11, *counts) for counts in ((0, 4), (4, 4), (8, 3))]
    assert stream.samples_used() == SamplesUsed(0, 11, 11)


def test_the_ledger_of_a_pass_that_is_resumed_counts_from_its_beginning() -> None:
    stream, _ = make_stream(divided_source(10))
    taken(stream, 4)
    stream.break_off()
    assert stream.samples_used() == SamplesUsed(0, 10, 3)
    taken(stream, 2)
    assert stream.samples_used() == SamplesUsed(0, 10, 4, 1)


class Stop(Exception):
    """Raised between two steps."""


def test_between_two_steps_somebody_may_look_and_stop(make_source: Callable[[int], LoaderSource]) -> None:
    stream, _ = make_stream(make_source(5))
    looks: list[int] = []

    def look(is_last: bool) -> None:
        looks.append(stream.num_batches_completed)
        if len(looks) == 3:
            raise Stop

    seen: list[int] = []
    with pytest.raises(Stop):
        seen.extend(_bare(batch) for batch in take(stream, None, look))
    assert (seen, looks) == ([0, 1, 2], [1, 2, 3])
    assert numbers(take(stream, None)) == [3, 4]


class Draws(torch.utils.data.Dataset[int]):
    """Draws a random number for each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**30, ()))


def test_processes_of_loaders_draw_other_numbers_on_each_rank_also_with_a_generator_of_the_user() -> None:
    found = []
    for rank in (0, 1, 0):
        loader = DataLoader(Draws(), batch_size=2, num_workers=1, generator=torch.Generator().manual_seed(3))
        sharded = shard_loader(loader, rank=rank, world_size=2, training=True)
        assert isinstance(sharded, ShardedLoader)
        found.append(numbers(take(make_stream(DividedLoaderSource(sharded, SEED))[0], None)))
    assert found[0] == found[2] != found[1]
