"""How much a rank's share of a batch counts: its samples, and the scale of its losses.

Covers `raysgd.tf.parallel.traced_step`: it is what the weights are told of a step.
"""

from __future__ import annotations

import pytest

from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects import losses
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.sample_weights import SampleWeights
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.parallel.traced_step import TracedStep, UsualStep
from tests.tf.alike import TwoAlike


class Replica:
    """The parts of one of two replicas that always have the same."""

    def __init__(self) -> None:
        self.traced, self.step, self.validation_step = TracedStep(), TFStep(), TFStep()
        self.weights = SampleWeights(ExchangeRecord(TwoAlike()), self.traced, self.step, self.validation_step)


def test_samples_are_those_of_our_loop_or_those_counted_or_one() -> None:
    replica = Replica()
    assert [replica.weights.num_samples_of(counted) for counted in (-1, 0, 5)] == [1, 0, 5]
    replica.step.begin(3, 6, (0.0, 0.0))
    assert replica.weights.num_samples_of(5) == 3


def test_a_sum_counts_by_the_samples_of_all_ranks_and_a_mean_by_its_weights() -> None:
    replica = Replica()
    with replica.traced.tracing(4, is_test=False):
        assert float(replica.weights.factor(losses.SUM)) == 2.0
        assert float(replica.weights.factor(2.0)) == 1.0
        assert len(replica.traced.exchanges) == 2
    assert replica.traced.exchanges == []


def test_losses_are_compared_in_an_evaluation_only_if_all_ranks_have_the_same_joint_batch() -> None:
    replica = Replica()
    with replica.traced.tracing(4, is_test=True):
        assert float(replica.weights.factor(losses.SUM)) == 1.0
        replica.weights.evaluates_together = True
        assert float(replica.weights.factor(losses.SUM)) == 2.0


def test_a_rank_without_samples_repeats_the_exchanges_of_its_usual_step() -> None:
    import tensorflow as tf

    replica, usual = Replica(), UsualStep()
    with pytest.raises(IncompatibleModelError, match="the first batch must have a sample"):
        usual.repeat_with_zeros()
    with replica.traced.tracing(4, is_test=False):
        replica.weights.factor(losses.SUM)
        usual.note(replica.traced.exchanges, {"loss": tf.constant([2.0])})
    assert usual.repeat_with_zeros()["loss"].numpy().tolist() == [0.0]
