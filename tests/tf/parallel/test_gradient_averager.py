"""The average of gradients by samples, in the form that each gradient had."""

from __future__ import annotations

import numpy as np
import pytest

from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.gradient_averager import GradientAverager
from raysgd.tf.parallel.sample_weights import SampleWeights
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.parallel.traced_step import TracedStep
from tests.tf.alike import TwoAlike


def averager() -> tuple[GradientAverager, ExchangeRecord, TFStep]:
    exchanges, traced, step = ExchangeRecord(TwoAlike()), TracedStep(), TFStep()
    return GradientAverager(exchanges, traced, SampleWeights(exchanges, traced, step, TFStep())), exchanges, step


@pytest.mark.parametrize("num_samples", [4, 1])
def test_the_mean_of_ranks_that_are_alike_is_what_each_has(num_samples: int) -> None:
    import tensorflow as tf

    average, exchanges, step = averager()
    for samples in (4, num_samples):
        step.begin(samples, 2 * samples, (0.0, 0.0))
        first, nothing, second = average.average([tf.constant([1.0, -2.0]), None, tf.constant(3.0)])
        step.confirm()
    assert nothing is None
    assert (first.numpy().tolist(), float(second)) == ([1.0, -2.0], 3.0)
    assert exchanges.num_completed == 2


def test_a_single_gradient_is_averaged_outside_of_a_graph_too() -> None:
    import tensorflow as tf

    average, _, step = averager()
    step.begin(4, 8, (0.0, 0.0))
    [mean] = average.average([tf.constant([1.0, -2.0])])
    assert mean.numpy().tolist() == [1.0, -2.0]


def test_rows_of_all_ranks_come_one_behind_the_other() -> None:
    import tensorflow as tf

    average, _, _ = averager()
    [rows] = average.average([tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([3]), tf.constant([5, 1]))])
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
        average.average([tf.constant([1.0])])
    assert exchanges.num_completed == 0
