"""The data of one replica: where it is, and what a saved position does to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.shared.types import World
from raysgd.exceptions import IncompatibleModelError, NotRegisteredError
from raysgd.tf.hosting.tf_feed import TFFeed
from raysgd.tf.hosting.tf_hosted import KerasParts
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.training_operator import RegisteredData, RegisteredObjects
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker.step_loop import StepLoop

REQUEST = EpochRequest(None, {}, False, seed=3)


class Operator:
    """What a feed looks at: datasets, and whose method trains on a batch."""

    train_batch = train_step = None
    world_rank = 0

    def __init__(self, train_dataset: Any) -> None:
        self.train_dataset = train_dataset
        data = RegisteredData(train_dataset, sharding="global")
        self._raysgd = SimpleNamespace(registered=RegisteredObjects(), data=data)

    @property
    def validation_dataset(self) -> Any:
        return self._raysgd.data.validation_dataset

    def add_validation(self, dataset: Any) -> None:
        self._raysgd.data = replace(self._raysgd.data, validation_dataset=dataset)


ALONE = World(0, 1)


def feed_of(shuffle: bool = True, seed: int = 3, validates: str = "") -> TFFeed:
    import tensorflow as tf

    dataset = tf.data.Dataset.range(12)
    if shuffle:
        dataset = dataset.shuffle(12, seed=1)
    operator: Any = Operator(dataset.batch(2))
    if validates:
        operator.add_validation(operator.train_dataset if validates == "same" else dataset.batch(4))
    return TFFeed(lambda: operator, Synchronizer(ALONE), ALONE, seed, None)


def validated(feed: TFFeed) -> list[int]:
    feed.align_validation()
    with feed.validating(REQUEST) as stream:
        return numbers(feed, stream, None)


def take(feed: TFFeed, num_steps: int | None = None) -> list[int]:
    return numbers(feed, feed.training(REQUEST), num_steps)


def parts_of(feed: TFFeed) -> KerasParts:
    return KerasParts(feed._operator_of(), feed._synchronizer, feed, feed._synchronizer.step)


def numbers(feed: TFFeed, cursor: Any, num_steps: int | None) -> list[int]:
    """What is in the batches of so many steps."""
    return [each for batch in StepLoop(cursor, parts_of(feed), num_steps).batches() for each in batch.numpy().tolist()]


def test_a_saved_position_leads_to_the_samples_that_were_not_used() -> None:
    first, second = feed_of(), feed_of()
    used = take(first, 8)
    position = first.position()
    assert position == {"pass_index": 1, "consumed": 4, "is_mid_pass": True, "seed": 3}
    second.go_to(first.epoch, position)
    assert second.position() == position, "also before anything is drawn"
    assert sorted(used[-4:] + take(second)) == list(range(12))
    assert second.epoch == first.epoch == 2


def test_a_position_names_the_order_of_a_pass_also_after_calls_that_brought_other_data() -> None:
    first, second = feed_of(), feed_of()
    first.epoch = 2  # of two such calls
    used = take(first, 4)
    second.go_to(first.epoch, first.position())
    assert sorted(used + take(second)) == list(range(12))
    assert take(first)[:4] != used
    first.go_to(2, None)
    assert take(first, 4) == used


def test_the_position_stays_in_another_group_and_the_rest_is_divided_again() -> None:
    feed = feed_of(shuffle=False)
    assert take(feed, 2) == [0, 1, 2, 3]
    feed.take_rank(World(1, 2))
    assert take(feed, 1) == [5]


@pytest.mark.parametrize("validates", ["other", "same"])
def test_a_new_worker_validates_on_the_samples_that_others_leave_to_it(validates: str) -> None:
    survivor, new = feed_of(validates=validates), feed_of(validates=validates)
    for _ in range(2):
        assert sorted(validated(survivor)) == list(range(12))
    for rank, feed in enumerate((survivor, new)):
        feed.take_rank(World(rank, 2))
    for _ in range(2):
        assert sorted(validated(survivor) + validated(new)) == list(range(12))
    other, third = feed_of(validates=validates), feed_of(validates=validates)
    validated(other)
    assert take(other) == take(third), "a validation leaves the order of the train dataset as it is"


def test_an_order_that_cannot_be_repeated_is_a_fresh_pass(caplog: pytest.LogCaptureFixture) -> None:
    first, other = feed_of(), feed_of(seed=4)
    take(first, 2)
    other.go_to(first.epoch, first.position())
    assert len(take(other)) == 12
    assert "cannot repeat the order of the interrupted pass" in caplog.text
    assert "new trainer with `seed=3`" in caplog.text


def test_a_position_that_is_unknown_is_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    feed = feed_of()
    feed.go_to(3, {"is_unknown": True, "pass_index": 2})
    assert len(take(feed)) == 12
    assert "epoch 2 stopped in the middle" in caplog.text


def test_the_first_step_of_a_process_must_have_a_sample_for_a_train_batch_of_the_users() -> None:
    feed = feed_of()
    with pytest.raises(IncompatibleModelError, match="The first step of this process has no sample for worker 0"):
        parts_of(feed).takes_padding(None)


def test_data_that_were_not_registered_are_an_error_where_a_batch_is_drawn() -> None:
    operator: Any = Operator(None)
    feed = TFFeed(lambda: operator, Synchronizer(World(0, 1)), World(0, 1), 3, None)
    stream = feed.training(REQUEST)
    assert feed.obstacle("train") is feed.obstacle("validation") is feed.position() is None
    with pytest.raises(NotRegisteredError, match="`train_dataset` was not registered"):
        numbers(feed, stream, None)
