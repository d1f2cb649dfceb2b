"""The average of gradients by samples: the buffer that they travel in, what is known of exchanges, the form of each."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from raysgd.core.arrays.division import plan_of
from raysgd.core.connections.group import Group
from raysgd.core.engine.shared.types import World
from raysgd.tf.parallel.averaging import ExchangeRecord, GradientAverager, GradientLayout
from raysgd.tf.parallel.global_losses import GlobalLosses
from raysgd.tf.parallel.step import TFStep, TracedStep
from raysgd.trainer.worker.ledger import Ledger
from tests.tf.lab import TwoAlike

GRADIENTS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32), np.array(2.0, np.float32)]


def test_gradients_come_back_in_their_shapes_times_the_weight() -> None:
    layout = GradientLayout(GRADIENTS)
    buffer = layout.free_buffer()
    layout.fill(buffer, GRADIENTS, 0.5)
    assert buffer[-1] == 0.5
    for before, after in zip(GRADIENTS, layout.split(buffer), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert np.array_equal(after, before * 0.5)


def test_every_gradient_begins_where_tensorflow_can_use_it_without_a_copy() -> None:
    layout = GradientLayout(GRADIENTS)
    assert [part.ctypes.data % 64 for part in layout.split(layout.free_buffer())] == [0, 0, 0]


def test_what_has_no_weight_may_be_anything() -> None:
    layout = GradientLayout(GRADIENTS)
    buffer = layout.free_buffer()
    layout.fill(buffer, [np.full_like(gradient, np.nan) for gradient in GRADIENTS], 0)
    assert not buffer.any()


def test_small_numbers_travel_as_larger_ones_and_large_ones_stay() -> None:
    half = [np.ones(3, np.float16)]
    assert GradientLayout(half).free_buffer().dtype == np.float32
    assert GradientLayout(half).split(GradientLayout(half).free_buffer())[0].dtype == np.float16
    assert GradientLayout([*half, np.ones(3)]).free_buffer().dtype == np.float64


def test_numbers_that_numpy_does_not_know_travel_too() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    gradients = [np.array([1.5, -2.0], ml_dtypes.bfloat16)]
    layout = GradientLayout(gradients)
    buffer = layout.free_buffer()
    layout.fill(buffer, gradients, 1.0)
    [back] = layout.split(buffer)
    assert back.dtype == gradients[0].dtype
    assert np.array_equal(back, gradients[0])


def test_a_buffer_is_used_again_only_when_nobody_looks_into_it() -> None:
    layout = GradientLayout(GRADIENTS)
    first = layout.free_buffer()
    address = first.ctypes.data
    views = layout.split(first)
    del first
    other = layout.free_buffer().ctypes.data
    assert other != address
    last = views[1][1:3]
    del views
    gc.collect()
    assert layout.free_buffer().ctypes.data == other
    del last
    kept = [layout.free_buffer() for _ in range(2)]
    assert {buffer.ctypes.data for buffer in kept} == {address, other}


@pytest.fixture
def record() -> ExchangeRecord:
    return ExchangeRecord(Group(World(0, 1)))


def test_samples_count_once_however_many_exchanges_a_step_has(record: ExchangeRecord) -> None:
    record.num_per_step = 2
    with record.measuring(Ledger()):
        for _ in range(2):
            with record.exchanging(8):
                pass
    assert (record.num_completed, record.num_samples) == (2, 8)
    record.forget_call()
    assert (record.num_completed, record.num_samples) == (2, 0)


def test_the_time_of_user_code_that_hangs_counts_while_it_does(
    record: ExchangeRecord,
) -> None:
    now = [10.0]
    ledger = Ledger(lambda: now[0])
    with ledger.call(), record.measuring(ledger):
        now[0] = 12.0
        with record.exchanging(8):
            now[0] = 20.0  # waiting for others
            assert ledger.own_s == 2.0
        now[0] = 80.0
        assert ledger.own_s == 62.0
    now[0] = 100.0
    assert ledger.own_s == 2.0


def test_outside_a_training_call_exchanges_are_only_counted(record: ExchangeRecord) -> None:
    with record.exchanging(8):
        pass
    assert (record.num_completed, record.num_samples) == (1, 0)


def test_an_exchange_that_raises_is_not_counted(record: ExchangeRecord) -> None:
    with pytest.raises(ConnectionError), record.measuring(Ledger()), record.exchanging(8):
        raise ConnectionError
    assert (record.num_completed, record.num_samples) == (0, 0)


def test_the_first_error_of_an_exchange_is_raised_instead_of_what_tensorflow_makes_of_it(
    record: ExchangeRecord,
) -> None:
    def exchange() -> None:
        record.note_error(ConnectionError("lost"))
        record.note_error(RuntimeError("what followed"))
        raise ValueError("TensorFlow's")

    with pytest.raises(ConnectionError, match="lost") as raised, record.surfacing_errors():
        exchange()
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="of the user"), record.surfacing_errors():
        raise ValueError("of the user")


def averager() -> tuple[GradientAverager, ExchangeRecord, TFStep]:
    exchanges, traced, step = ExchangeRecord(TwoAlike()), TracedStep(), TFStep()
    return (
        GradientAverager(exchanges, traced, GlobalLosses(exchanges, traced, step, TFStep()).num_samples_of),
        exchanges,
        step,
    )


@pytest.mark.parametrize("num_samples", [4, 1])
def test_the_mean_of_ranks_that_are_alike_is_what_each_has(num_samples: int) -> None:
    import tensorflow as tf

    average, exchanges, step = averager()
    for samples in (4, num_samples):
        step.begin_batch(plan_of(samples, 2 * samples))
        first, nothing, second = average.average([tf.constant([1.0, -2.0]), None, tf.constant(3.0)], print)
        step.confirm()
    assert nothing is None
    assert (first.numpy().tolist(), float(second)) == ([1.0, -2.0], 3.0)
    assert exchanges.num_completed == 2


def test_a_single_gradient_is_averaged_outside_of_a_graph_too() -> None:
    import tensorflow as tf

    average, _, step = averager()
    step.begin_batch(plan_of(4, 8))
    [mean] = average.average([tf.constant([1.0, -2.0])], print)
    assert mean.numpy().tolist() == [1.0, -2.0]


def test_rows_of_all_ranks_come_one_behind_the_other() -> None:
    import tensorflow as tf

    average, _, _ = averager()
    [rows] = average.average([tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([3]), tf.constant([5, 1]))], print)
    assert isinstance(rows, tf.IndexedSlices)
    assert rows.indices.numpy().tolist() == [3, 3]
    assert np.allclose(rows.values.numpy(), [[1.0], [1.0]])


def test_what_an_observer_raises_ahead_of_an_exchange_is_raised_instead_of_it() -> None:
    import tensorflow as tf

    average, exchanges, _ = averager()

    def refuse() -> None:
        raise ConnectionError("not now")

    exchanges.before_exchange = refuse
    with pytest.raises(ConnectionError, match="not now"), exchanges.surfacing_errors():
        average.average([tf.constant([1.0])], print)
    assert exchanges.num_completed == 0
