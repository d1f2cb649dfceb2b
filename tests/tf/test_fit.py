"""Where `fit` is, told by exchanges of gradients: what Keras would do, done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.core.connections.group import Group
from raysgd.core.engine.shared.types import World
from raysgd.tf.data.sources import Passes
from raysgd.tf.fit import FitPlace, FitStream, one_part
from raysgd.tf.parallel.averaging import ExchangeRecord


class Keras:
    """Takes steps of so many exchanges over a shuffled dataset of ten batches."""

    def __init__(self, num_exchanges: int = 1, steps_per_epoch: int | None = None) -> None:
        import tensorflow as tf

        self.exchanges = ExchangeRecord(Group(World(0, 1)))
        self.exchanges.num_per_step = num_exchanges
        self.stream = FitStream(Passes(tf.data.Dataset.range(10).shuffle(10, seed=1).batch(1)), self.exchanges)
        self.steps_per_epoch = steps_per_epoch
        self.batches: Any = None

    def step(self, num_exchanges: int | None = None) -> int:
        """A step, or a part of one; the number that it was given."""
        number = int(next(self.batches)[0])
        per_step = self.exchanges.num_per_step
        self.exchanges.num_completed += per_step if num_exchanges is None else num_exchanges
        return number

    def fit(self) -> None:
        self.stream.begin_fit(0)
        self.batches = iter(self.stream.data())

    def epoch(self, index: int, num_steps: int) -> list[int]:
        self.stream.begin_epoch(index)
        if self.batches is None:
            self.batches = iter(self.stream.data())
        numbers = [self.step() for _ in range(num_steps)]
        self.stream.end_epoch({"loss": float(index)}, self.steps_per_epoch)
        if self.steps_per_epoch is None:
            self.batches = None
        return numbers


def test_steps_are_exchanges_divided_by_those_of_a_step() -> None:
    keras = Keras(num_exchanges=2)
    keras.fit()
    keras.stream.begin_epoch(0)
    for _ in range(3):
        keras.step()
    assert (keras.stream.num_batches_completed, keras.stream.is_whole) == (3, True)
    keras.step(num_exchanges=1)
    assert (keras.stream.num_batches_completed, keras.stream.is_whole) == (3, False)


def test_a_state_between_two_steps_of_one_execution_is_no_whole_one() -> None:
    keras = Keras()
    keras.stream.steps_per_execution = 2
    keras.fit()
    keras.stream.begin_epoch(0)
    whole = []
    for _ in range(4):
        keras.step()
        whole.append(keras.stream.is_whole)
    assert whole == [False, True, False, True]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_epoch_that_broke_off_goes_on_with_what_was_not_used(is_elsewhere: bool) -> None:
    keras = Keras()
    keras.fit()
    first = keras.epoch(0, 10)
    keras.fit()
    keras.stream.begin_epoch(1)
    used = [keras.step() for _ in range(4)]
    keras.stream.break_off()
    state = keras.stream.state()
    assert state == {
        "epoch": 1,
        "num_steps": 4,
        "num_passes": 1,
        "num_batches": 4,
        "logs": {"loss": 0.0},
        "is_over": False,
    }
    if is_elsewhere:
        keras = Keras()
        keras.stream.resume(state)
    assert keras.stream.begin_fit(0)
    keras.batches = iter(keras.stream.data())
    rest = keras.epoch(1, 6)
    assert sorted(used + rest) == list(range(10))
    assert used + rest != first, "each pass has an order of its own"
    assert keras.stream.place == FitPlace(2, num_passes=2, logs={"loss": 1.0})


def test_with_steps_per_epoch_a_pass_goes_on_across_epochs() -> None:
    keras = Keras(steps_per_epoch=3)
    keras.fit()
    used = [*keras.epoch(0, 3), *keras.epoch(1, 3)]
    keras.stream.begin_epoch(2)
    used.append(keras.step())
    keras.stream.break_off()
    assert keras.stream.place == FitPlace(2, num_steps=1, num_passes=0, num_batches=7, logs={"loss": 1.0})
    keras.fit()
    used += keras.epoch(2, 2)
    assert keras.stream.place == FitPlace(3, num_passes=0, num_batches=9, logs={"loss": 2.0})
    assert len(set(used)) == 9


def test_what_is_over_says_how_many_passes_there_were() -> None:
    keras = Keras()
    keras.fit()
    keras.epoch(0, 10)
    keras.stream.commit()
    assert (keras.stream.is_mid_pass, keras.stream.begin_fit(0)) == (True, True), "what follows may break off"
    keras.stream.end()
    assert keras.stream.state() == {"num_passes": 1, "logs": {"loss": 0.0}}
    assert not keras.stream.is_mid_pass
    other = Keras()
    other.stream.resume(keras.stream.state())
    keras.fit(), other.fit()
    assert other.epoch(0, 10) == keras.epoch(0, 10)


class Optimizer:
    num_finalized = 0

    def finalize_variable_values(self, variables: Any) -> None:
        self.num_finalized += 1


class Model:
    def __init__(self) -> None:
        self.num_resets = 0
        self.optimizer = Optimizer()

    def reset_metrics(self) -> None:
        self.num_resets += 1


class Callback:
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.told.append("begin")

    def on_train_end(self, logs: Any = None) -> None:
        self.told.append("end")


def test_metrics_go_on_counting_in_the_first_epoch_of_a_part_and_callbacks_are_not_told() -> None:
    model, callback = Model(), Callback()
    with one_part(model, [callback], measures=True, silenced=["on_train_begin"], is_last=False):
        callback.on_train_begin()
        model.reset_metrics()
        model.optimizer.finalize_variable_values([])
        assert (model.num_resets, model.optimizer.num_finalized) == (0, 0)
        model.reset_metrics()
        callback.on_train_end()
    callback.on_train_begin()
    model.optimizer.finalize_variable_values([])
    assert (model.num_resets, callback.told) == (1, ["end", "begin"])
    assert model.optimizer.num_finalized == 1
