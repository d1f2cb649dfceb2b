"""What is known of the exchanges between ranks: their number, the time between them, what they raised."""

from __future__ import annotations

import pytest

from raysgd.connections.group import Group
from raysgd.engine.shared.types import World
from raysgd.tf.parallel.exchange_record import ExchangeRecord


@pytest.fixture
def record() -> ExchangeRecord:
    return ExchangeRecord(Group(World(0, 1)))


def test_samples_count_once_however_many_exchanges_a_step_has(record: ExchangeRecord) -> None:
    record.num_per_step = 2
    with record.measuring():
        for _ in range(2):
            with record.exchanging(8):
                pass
    assert (record.num_completed, record.num_samples) == (2, 8)
    assert record.own_s > 0
    record.forget_call()
    assert (record.num_completed, record.num_samples, record.own_s) == (2, 0, 0.0)


def test_an_exchange_that_no_optimizer_steps_after_is_not_counted(record: ExchangeRecord) -> None:
    with record.measuring(), record.exchanging(8, is_step=False):
        pass
    assert (record.num_completed, record.num_samples) == (0, 0)


def test_outside_a_training_call_exchanges_are_only_counted(record: ExchangeRecord) -> None:
    with record.exchanging(8):
        pass
    assert (record.num_completed, record.num_samples, record.own_s) == (1, 0, 0.0)


def test_an_exchange_that_raises_is_not_counted(record: ExchangeRecord) -> None:
    with pytest.raises(ConnectionError), record.measuring(), record.exchanging(8):
        raise ConnectionError
    assert (record.num_completed, record.num_samples) == (0, 0)


def test_the_first_error_of_an_exchange_is_raised_instead_of_what_tensorflow_makes_of_it(
    record: ExchangeRecord,
) -> None:
    def exchange() -> None:
        record.note(ConnectionError("lost"))
        record.note(RuntimeError("what followed"))
        raise ValueError("TensorFlow's")

    with pytest.raises(ConnectionError, match="lost") as raised, record.surfacing_errors():
        exchange()
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="of the user"), record.surfacing_errors():
        raise ValueError("of the user")
