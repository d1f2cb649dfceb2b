"""The data of one replica: where it is, what a saved position does to it, and what becomes of it in another group.

Covers `raysgd.trainer.worker.feed`: what it shares with TensorFlow is seen here over loaders.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from raysgd.core.arrays.division import Division
from raysgd.core.arrays.user_data import CallData
from raysgd.streams.source import stream_data
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.data.sample_order import ShuffledOrder
from raysgd.torch.data.sampling import GlobalBatchRule, UndividedLoader, shard_loader
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.sync import DDPSync
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.replica_state import check_progress
from raysgd.trainer.worker.step_loop import StepLoop, StepParts
from tests.streams.made import MadeStream

REQUEST = EpochRequest(None, {}, False, seed=3)


def feed_of(num_samples: int = 12, size: int = 1, batch_size: int = 2, shuffle: bool = True) -> TorchFeed:
    loader = DataLoader(range(num_samples), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]
    data = {"train": shard_loader(loader, rank=0, world_size=size, training=True)}
    return TorchFeed(data.get, Strategy(), size)


def take(feed: TorchFeed, num_steps: int | None = None) -> list[int]:
    loop = StepLoop(feed.training(REQUEST), StepParts(feed, Leg()), num_steps)
    return [number for batch in loop.batches() for number in batch.tolist()]


def test_a_position_that_does_not_fit_a_stream_is_refused_until_another_one_is_loaded() -> None:
    def feed_over(lengths: list[int]) -> TorchFeed:
        data = stream_data(MadeStream(lengths).map(itemgetter(1)).batch(4), "train", Division, 1)
        return TorchFeed({"train": data}.get, Strategy(), 1)

    first, other = feed_over([12]), feed_over([13])
    used = take(first, 2)
    position = first.position()
    with pytest.raises(ValueError, match=r"over other data \(digest of names, lengths and versions of shards"):
        other.check_position(position)
    other.go_to(1, position)
    for _ in range(2):
        with pytest.raises(ValueError, match="over other data"):
            take(other, 1)
    take(first)
    border = first.position()
    assert border is not None
    other.check_position(border)  # between two epochs the folder may have grown
    other.go_to(1, border)
    assert sorted(take(other)) == list(range(13))
    again = feed_over([12])
    again.check_position(position)
    again.go_to(1, position)
    assert sorted(used + take(again)) == list(range(12))


def shuffled_feed(drawn_below: int = 0, rank: int = 0, size: int = 1) -> TorchFeed:
    """Shuffled as data of a million samples are, or as small data."""
    loader = DataLoader(range(12), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    data = shard_loader(loader, rank=rank, world_size=size, training=True)
    assert not isinstance(data, UndividedLoader)
    data.sampler.order = ShuffledOrder(12, drawn_below)
    return TorchFeed({"train": data}.get, Strategy(), size, rank=rank)


@pytest.mark.parametrize("drawn_below", [0, 13])
def test_a_saved_position_leads_to_the_samples_that_were_not_used(drawn_below: int) -> None:
    """Whether the order is drawn or computed."""
    first, second = shuffled_feed(drawn_below), shuffled_feed(drawn_below)
    used = take(first, 8)
    position = first.position()
    at = {"pass_index": 1, "consumed": 4, "is_mid_pass": True}
    assert position == {**at, "seed": 3, "num_samples": 12, "order_name": "shuffled"}
    second.go_to(first.epoch, position)
    assert second.position() == position, "also before anything is drawn"
    rest = take(second)
    assert sorted(used[-4:] + rest) == list(range(12))
    assert second.epoch == first.epoch == 2
    assert (take(first), take(first)) == (rest, take(second)), "the next pass has the same order too"


def test_a_new_worker_takes_the_order_of_those_that_stay() -> None:
    """Whether it is drawn or computed."""
    for drawn_below in (0, 13):
        before = shuffled_feed(drawn_below, size=2)
        first = take(before, 1)
        position, parts = before.position(), [first]
        for rank in (0, 1):
            feed = shuffled_feed(drawn_below, rank, size=2)
            feed.go_to(before.epoch, position)
            parts.append(take(feed))
        beside = shuffled_feed(drawn_below, 1, size=2)
        beside.go_to(0, {**position, "consumed": 0})  # type: ignore[dict-item]
        parts.append(take(beside, 1))
        assert sorted(itertools.chain(*parts)) == list(range(12))


@pytest.mark.parametrize("said", [{}, {"is_mid_pass": None}, {"is_mid_pass": 1}])
def test_a_position_has_to_say_if_it_is_inside_a_pass(said: dict[str, Any]) -> None:
    position = {"pass_index": 0, "consumed": 4, "seed": 3, "num_samples": 12}
    check_progress(0, {"position": {**position, "is_mid_pass": True}})
    with pytest.raises(ValueError, match="does not say if it is inside"):
        check_progress(0, {"position": {**position, **said}})


def test_between_passes_the_next_one_is_begun(caplog: pytest.LogCaptureFixture) -> None:
    first, second = feed_of(), feed_of()
    take(first)
    second.go_to(first.epoch, first.position())
    assert take(second) == take(first) != take(feed_of())
    assert not caplog.text


def test_a_position_in_other_data_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    other, feed = feed_of(10), feed_of()
    take(other, 2)
    feed.go_to(other.epoch, other.position())
    assert len(take(feed)) == 12
    assert "the size of the train data has changed" in caplog.text


def test_a_position_inside_another_order_begins_a_new_epoch_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    shuffled, feed, of_before = feed_of(), feed_of(shuffle=False), feed_of(shuffle=False)
    take(shuffled, 2)
    position = shuffled.position() or {}
    feed.go_to(shuffled.epoch, position)
    assert take(feed) == list(range(12))
    assert "the order of the train data has changed" in caplog.text
    assert "from shuffled to sequential: starting a new epoch" in caplog.text
    caplog.clear()
    of_before.go_to(shuffled.epoch, {name: value for name, value in position.items() if name != "order_name"})
    assert take(of_before) == list(range(4, 12)), "files of earlier versions do not have the name of the order"
    assert not caplog.text


def test_between_two_epochs_the_order_may_change(caplog: pytest.LogCaptureFixture) -> None:
    shuffled, feed = feed_of(), feed_of(shuffle=False)
    take(shuffled)
    feed.go_to(shuffled.epoch, shuffled.position())
    assert take(feed) == list(range(12))
    assert not caplog.text


class Counts(Sampler[int]):
    """Goes by a count of its own, which no other process shares."""

    num_drawn = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.num_drawn += 1
        return iter([(number * 5 + self.num_drawn) % 12 for number in range(12)])


def counting_feed(parallel: Strategy, size: int, num_drawn: int = 0) -> TorchFeed:
    sampler = Counts()
    sampler.num_drawn = num_drawn
    loader = DataLoader(range(12), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    return TorchFeed({"train": shard_loader(loader, rank=0, world_size=size, training=True)}.get, parallel, size)


def test_a_sampler_that_draws_another_order_on_resumption_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    first, same, other = (counting_feed(Strategy(), 1, num_drawn) for num_drawn in (0, 0, 3))
    take(first, 2)
    position = first.position()
    same.go_to(first.epoch, position)
    take(same, 1)
    assert not caplog.text
    other.go_to(first.epoch, position)
    other.training(REQUEST)
    assert other.position() == position, "as long as nothing is drawn"
    take(other, 1)
    assert "sampler Counts draws another order than in the epoch that is resumed" in caplog.text


class Pair(Strategy):
    """One of two replicas, of which the other one has `theirs`."""

    def __init__(self, theirs: TorchFeed | None) -> None:
        super().__init__(DDPSync())
        self.theirs = theirs

    def summation(self) -> Any:
        def start(numbers: torch.Tensor) -> Any:
            sampler = self.theirs._data_of("train").sampler  # type: ignore[union-attr]
            sampler.plan_pass(0, REQUEST.seed)
            halves = divmod(sampler.fingerprint(), 2**20)
            return lambda: numbers.add_(torch.tensor([(half, half**2) for half in halves]))

        return start


@pytest.mark.parametrize("num_drawn", [0, 3])
def test_a_sampler_that_draws_another_order_on_another_rank_is_an_error(num_drawn: int) -> None:
    feed = counting_feed(Pair(counting_feed(Strategy(), 2, num_drawn)), 2)
    if num_drawn == 0:
        assert len(take(feed)) == 6
    else:
        with pytest.raises(ValueError, match=r"sampler Counts drew different orders.*`add_dist_sampler=False`"):
            take(feed)


@pytest.mark.parametrize(("instead_of", "expected"), [(4, 2), (8, 4), (None, 4)])
def test_batches_follow_the_group_where_they_were_made_to(instead_of: int | None, expected: int) -> None:
    feed = feed_of(batch_size=4, shuffle=False)
    feed.take_rank(0, 2, 2 if instead_of else None, instead_of)
    assert take(feed, 1) == list(range(expected))


def test_a_call_over_batches_that_the_driver_deals_cannot_go_on_in_them() -> None:
    feed, request = TorchFeed(lambda name: None, Strategy(), 1), replace(REQUEST, shard_key="of this call")
    feed.take_share("train", request, CallData("shards", [torch.zeros(2)]))
    stream = feed.training(request)
    assert feed.obstacle_of_call(stream) == "the data of this call are not sharded by the library"
    assert not feed.is_divided(stream)


def test_smaller_batches_begin_with_the_next_sample() -> None:
    loader, rule = DataLoader(range(12), batch_size=4), GlobalBatchRule()  # type: ignore[arg-type]
    data = {"train": shard_loader(loader, rank=0, world_size=1, training=True, rule=rule)}
    feed = TorchFeed(data.get, Strategy(), 1, rule=rule)
    assert take(feed, 1) == [0, 1, 2, 3]
    loop = StepLoop(feed.training(replace(REQUEST, largest_batch=2)), StepParts(feed, Leg()), None)
    assert [batch.tolist() for batch in loop.batches()] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert feed.largest_batch == 2


def test_nobody_knows_the_position_in_data_that_are_not_divided() -> None:
    data: dict[str, Any] = {"validation": UndividedLoader([1, 2], "not a torch DataLoader", warn=False)}
    feed = TorchFeed(data.get, Strategy(), 1)
    assert feed.obstacle("train") is None
    assert feed.obstacle("validation") == "the validation loader is not sharded by the library (not a torch DataLoader)"
    with feed.validating(REQUEST) as stream:
        assert list(StepLoop(stream, StepParts(feed, Leg()), None).batches()) == [1, 2]
    assert feed.position() is feed.samples_used() is None
