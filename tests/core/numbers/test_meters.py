"""Averages of metrics: sums and weights, what they accept, and what waits for a step.

Covers `raysgd.core.numbers.meters`, too.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy
import pytest

from raysgd.core.numbers.meters import MAX_UNREAD, AverageMeter, AverageMeterCollection, MetricSummary


class FakeTensor:
    """A tensor that counts how often it is read."""

    num_reads = 0

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.shape = (len(values),)

    def numel(self) -> int:
        return len(self.values)

    def detach(self) -> FakeTensor:
        return self

    def clone(self) -> FakeTensor:
        return FakeTensor(*self.values)

    def __float__(self) -> float:
        FakeTensor.num_reads += 1
        return float(self.values[0])


class FakeState:
    """The captured state of a `FakeMetric`: everything it saw, in order."""

    def __init__(self, seen: Sequence[float]) -> None:
        self.seen = list(seen)

    def value(self) -> float:
        if len(self.seen) < 2:
            raise ValueError("need two")
        return max(self.seen) - min(self.seen)

    def merged_with(self, others: Sequence[FakeState], /) -> FakeState:
        return FakeState([*self.seen, *(value for other in others for value in other.seen)])


class FakeMetric:
    """A metric object: the spread of what it saw."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def merge_state(self, other: FakeMetric) -> None:
        self.seen += other.seen

    def compute(self) -> float:
        return max(self.seen) - min(self.seen)


def capture(metric: FakeMetric) -> FakeState:
    state = FakeState(metric.seen)
    metric.seen = []
    return state


@pytest.fixture(autouse=True)
def no_reads_yet() -> None:
    FakeTensor.num_reads = 0


class TestAverageMeter:
    def test_weight_zero_first_leaves_the_mean_at_zero(self) -> None:
        meter = AverageMeter()
        meter.update(7, n=0)
        assert (meter.val, meter.avg, meter.sum, meter.count) == (7, 0, 0, 0)

    def test_weight_zero_keeps_nan_out_of_the_mean(self) -> None:
        meter = AverageMeter()
        meter.update(5, n=2)
        meter.update(math.nan, n=0)
        assert (meter.avg, meter.sum, meter.count) == (5, 10, 2)

    def test_reset_forgets(self) -> None:
        meter = AverageMeter()
        meter.update(5)
        meter.reset()
        assert (meter.val, meter.avg, meter.sum, meter.count) == (0, 0, 0, 0)


class TestNumbers:
    def test_keys_come_in_the_order_in_which_metrics_were_first_seen(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"b": 1})
        meters.update({"a": 1, "b": 1})
        assert list(meters.summary()) == ["batch_count", "num_samples", "b", "last_b", "a", "last_a"]

    def test_a_metric_counts_only_in_the_batches_that_have_it(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"loss": 1.0, "rare": 3.0}, n=2)
        meters.update({"loss": 2.0}, n=6)
        summary = meters.summary()
        assert (summary["loss"], summary["rare"], summary["last_rare"]) == (1.75, 3.0, 3.0)
        assert summary.totals == {"loss": (14.0, 8.0), "rare": (6.0, 2.0)}

    @pytest.mark.parametrize("names", [("loss", "last_loss"), ("last_loss", "loss")])
    def test_a_metric_goes_before_the_last_value_of_another(self, names: tuple[str, str]) -> None:
        meters = AverageMeterCollection()
        for value in (1.0, 3.0):
            meters.update(dict.fromkeys(names, value))
        summary = meters.summary()
        assert (summary["last_loss"], summary["last_last_loss"]) == (2.0, 3.0)
        assert summary.totals["last_loss"] == (4.0, 2.0)

    def test_one_nan_batch_makes_the_mean_nan_and_not_the_last_value(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"score": float("nan")})
        meters.update({"score": 0})
        summary = meters.summary()
        assert math.isnan(summary["score"])
        assert summary["last_score"] == 0

    def test_weight_zero_keeps_even_nan_out_of_the_mean(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"loss": 2.0}, n=4)
        meters.update({"loss": float("nan")}, n=0)
        assert meters.summary()["loss"] == 2.0
        assert meters.summary()["batch_count"] == 2

    def test_a_metric_without_any_weight_has_no_mean(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"loss": 2.0}, n=0)
        summary = meters.summary()
        assert math.isnan(summary["loss"])
        assert summary["last_loss"] == 2.0
        assert summary.totals == {"loss": (0.0, 0.0)}

    @pytest.mark.parametrize(
        "value",
        [
            2,
            2.0,
            True + True,
            numpy.float32(2),
            numpy.int64(2),
            numpy.array(2.0),
            numpy.array([2.0]),
            Fraction(2),
        ],
        ids=lambda value: f"{type(value).__name__}{getattr(value, 'shape', '')}",
    )
    def test_all_kinds_of_numbers_count(self, value: Any) -> None:
        meters = AverageMeterCollection()
        meters.update({"x": value}, n=3)
        assert meters.summary() == {"batch_count": 1, "num_samples": 3, "x": 2.0, "last_x": 2.0}

    @pytest.mark.parametrize("value", [True, numpy.bool_(True)])
    def test_truth_values_count_as_one_and_zero(self, value: Any) -> None:
        meters = AverageMeterCollection()
        meters.update({"hit": value})
        meters.update({"hit": not value})
        assert meters.summary()["hit"] == 0.5

    def test_a_weight_beside_the_metrics_is_theirs_and_samples_are_counted(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"loss": 1.0, "batch_weight": 30}, n=2)
        meters.add_pending({"loss": 2.0, "batch_weight": numpy.float32(10)}, n=4)
        meters.count_pending()
        assert meters.summary() == {"batch_count": 2, "num_samples": 6, "loss": 1.25, "last_loss": 2.0}
        assert meters.summary().totals == {"loss": (50.0, 40.0)}

    def test_numpy_weights_give_plain_numbers(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"x": numpy.float32(0.5)}, n=numpy.int64(3))  # type: ignore[arg-type]
        assert {type(value) for value in meters.summary().values()} == {int, float}

    def test_sums_are_kept_in_double_precision(self) -> None:
        meters = AverageMeterCollection()
        for _ in range(10):
            meters.update({"x": numpy.float32(1e8)})
            meters.update({"x": numpy.float32(1)})
        assert meters.summary().totals["x"] == (10 * (1e8 + 1), 20.0)

    @pytest.mark.parametrize("value", ["0.5", None, [0.5], {"a": 1}, 1j], ids=repr)
    def test_other_things_are_refused_by_name(self, value: Any) -> None:
        with pytest.raises(TypeError, match=rf"metric `speed` is a `{type(value).__name__}`: allowed are numbers"):
            AverageMeterCollection().update({"speed": value})

    def test_arrays_with_several_elements_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"metric `speed` has shape `\(2,\)`.*exactly one element"):
            AverageMeterCollection().update({"speed": numpy.zeros(2)})

    def test_a_refused_metric_leaves_no_trace(self) -> None:
        meters = AverageMeterCollection()
        with pytest.raises(TypeError, match="speed"):
            meters.update({"speed": "fast"})
        assert meters.summary() == {"batch_count": 0, "num_samples": 0}


class TestTensors:
    def test_are_read_in_one_go_when_the_summary_is_made(self) -> None:
        calls: list[int] = []

        def to_floats(tensors: list[Any]) -> list[float]:
            calls.append(len(tensors))
            return [float(tensor) for tensor in tensors]

        meters = AverageMeterCollection(to_floats)
        meters.update({"loss": FakeTensor(1.0), "accuracy": FakeTensor(0.5)}, n=1)
        meters.update({"loss": FakeTensor(2.0)}, n=3)
        assert calls == []
        assert meters.summary() == {
            "batch_count": 2,
            "num_samples": 4,
            "loss": 1.75,
            "last_loss": 2.0,
            "accuracy": 0.5,
            "last_accuracy": 0.5,
        }
        assert calls == [3]

    def test_are_read_earlier_when_very_many_wait(self) -> None:
        meters = AverageMeterCollection()
        for number in range(MAX_UNREAD + 1):
            meters.update({"loss": FakeTensor(number)})
        assert FakeTensor.num_reads == MAX_UNREAD
        summary = meters.summary()
        assert summary.totals["loss"] == (MAX_UNREAD * (MAX_UNREAD + 1) / 2, MAX_UNREAD + 1)
        assert summary["last_loss"] == MAX_UNREAD

    def test_the_last_value_is_known_right_after_an_early_reading(self) -> None:
        meters = AverageMeterCollection()
        for number in range(MAX_UNREAD):
            meters.update({"loss": FakeTensor(number)})
        assert meters.summary()["last_loss"] == MAX_UNREAD - 1

    def test_changes_in_place_after_the_batch_do_not_count(self) -> None:
        running = FakeTensor(1.0)
        meters = AverageMeterCollection()
        meters.update({"loss": running})
        running.values[0] = 100.0
        assert meters.summary()["loss"] == 1.0

    def test_may_take_turns_with_numbers(self) -> None:
        meters = AverageMeterCollection()
        meters.update({"loss": FakeTensor(1.0)})
        meters.update({"loss": 4.0})
        assert meters.summary()["last_loss"] == 4.0
        meters.update({"loss": FakeTensor(7.0)})
        assert (meters.summary()["loss"], meters.summary()["last_loss"]) == (4.0, 7.0)

    @pytest.mark.parametrize("size", [0, 2])
    def test_with_more_or_less_than_one_element_are_refused_by_name(self, size: int) -> None:
        with pytest.raises(ValueError, match=rf"metric `logits` has shape `\({size},\)`.*exactly one element"):
            AverageMeterCollection().update({"logits": FakeTensor(*[0.0] * size)})


class TestMetricObjects:
    def test_appear_under_their_name_without_a_last_value(self) -> None:
        metric = FakeMetric()
        meters = AverageMeterCollection(capture_object=capture)
        for number in (1.0, 5.0, 3.0):
            metric.seen.append(number)
            meters.update({"loss": 0.5, "spread": metric}, n=1)
        summary = meters.summary()
        assert summary == {"batch_count": 3, "num_samples": 3, "loss": 0.5, "last_loss": 0.5, "spread": 4.0}
        assert summary.objects["spread"].seen == [1.0, 5.0, 3.0]  # type: ignore[attr-defined]
        assert set(summary.totals) == {"loss"}

    def test_are_reset_by_the_capture_and_a_second_summary_still_covers_all(self) -> None:
        metric = FakeMetric()
        meters = AverageMeterCollection(capture_object=capture)
        metric.seen += [1.0, 2.0]
        meters.update({"spread": metric})
        assert meters.summary()["spread"] == 1.0
        assert metric.seen == []
        assert meters.summary()["spread"] == 1.0
        metric.seen.append(10.0)
        meters.update({"spread": metric})
        assert meters.summary()["spread"] == 9.0

    def test_the_last_object_under_a_name_wins(self) -> None:
        first, second = FakeMetric(), FakeMetric()
        first.seen, second.seen = [0.0, 100.0], [0.0, 1.0]
        meters = AverageMeterCollection(capture_object=capture)
        meters.update({"spread": first})
        meters.update({"spread": second})
        assert meters.summary()["spread"] == 1.0

    def test_one_object_under_two_names_is_captured_once(self) -> None:
        metric = FakeMetric()
        metric.seen = [0.0, 1.0]
        meters = AverageMeterCollection(capture_object=capture)
        meters.update({"a": metric, "b": metric})
        assert (meters.summary()["a"], meters.summary()["b"]) == (1.0, 1.0)

    def test_a_share_too_small_for_the_metric_gives_nan_and_keeps_the_state(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        metric = FakeMetric()
        metric.seen = [1.0]
        meters = AverageMeterCollection(capture_object=capture)
        meters.update({"spread": metric})
        summary = meters.summary()
        assert math.isnan(summary["spread"])
        assert summary.objects["spread"].seen == [1.0]  # type: ignore[attr-defined]
        assert (
            "metric `spread` cannot be computed on this worker's share alone, so it reports NaN: need two"
            in caplog.text
        )

    def test_are_refused_where_nothing_can_capture_them(self) -> None:
        with pytest.raises(TypeError, match="metric `spread` is a `FakeMetric`: allowed are numbers"):
            AverageMeterCollection().update({"spread": FakeMetric()})

    def test_a_name_stays_with_its_kind(self) -> None:
        meters = AverageMeterCollection(capture_object=capture)
        meters.update({"object": FakeMetric(), "number": 1})
        with pytest.raises(TypeError, match="metric `object` was a metric object in an earlier batch"):
            meters.update({"object": 1})
        with pytest.raises(TypeError, match="metric `number` is a `FakeMetric`"):
            meters.update({"number": FakeMetric()})


class TestMetricSummary:
    @pytest.fixture
    def summary(self) -> MetricSummary:
        metric = FakeMetric()
        metric.seen = [0.0, 1.0]
        meters = AverageMeterCollection(capture_object=capture)
        meters.update({"loss": 0.5, "broken": float("nan"), "spread": metric}, n=4)
        return meters.summary()

    @pytest.mark.parametrize(
        "duplicate",
        [copy.copy, copy.deepcopy, lambda summary: pickle.loads(pickle.dumps(summary))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_copies_keep_sums_and_objects(self, summary: MetricSummary, duplicate: Any) -> None:
        result = duplicate(summary)
        assert type(result) is MetricSummary
        assert repr(dict(result)) == repr(dict(summary))
        assert repr(result.totals) == repr({"loss": (2.0, 4.0), "broken": (float("nan"), 4.0)})
        assert result.objects["spread"].seen == [0.0, 1.0]  # type: ignore[attr-defined]

    def test_a_removed_value_loses_its_sum(self, summary: MetricSummary) -> None:
        del summary["loss"]
        assert set(summary.totals) == {"broken"}

    def test_an_edited_value_loses_its_object(self, summary: MetricSummary) -> None:
        summary["spread"] = 2.0
        assert summary.objects == {}


class TestGoingOn:
    """A collection that goes on with what another one had counted."""

    def counted(self, *losses: float, n: int = 1) -> AverageMeterCollection:
        meters = AverageMeterCollection()
        for loss in losses:
            meters.update({"loss": loss}, n)
        return meters

    def metric(self, *seen: float) -> FakeMetric:
        metric = FakeMetric()
        metric.seen = list(seen)
        return metric

    def test_it_counts_as_if_it_had_seen_all_batches_itself(self) -> None:
        meters = AverageMeterCollection()
        meters.go_on_from(self.counted(1.0, 2.0, n=2).summary())
        meters.update({"loss": 6.0}, n=4)
        whole = self.counted(1.0, 2.0, n=2)
        whole.update({"loss": 6.0}, n=4)
        assert dict(meters.summary()) == dict(whole.summary())
        assert meters.summary().totals == whole.summary().totals

    def test_the_last_value_is_that_of_the_other_until_there_is_one_of_its_own(self) -> None:
        meters = AverageMeterCollection()
        meters.go_on_from(self.counted(1.0, 2.0).summary())
        assert meters.summary()["last_loss"] == 2.0
        meters.update({"loss": 5.0})
        assert meters.summary()["last_loss"] == 5.0

    def test_several_ranks_add_up_in_samples_but_took_the_same_steps(self) -> None:
        meters = AverageMeterCollection()
        for losses in ((1.0, 3.0), (5.0, 7.0)):
            meters.go_on_from(self.counted(*losses, n=3).summary())
        assert (meters.summary()["batch_count"], meters.summary()["num_samples"]) == (2, 12)
        assert meters.summary()["loss"] == 4.0

    def test_nothing_seen_adds_nothing(self) -> None:
        meters = self.counted(1.0)
        meters.go_on_from(AverageMeterCollection().summary())
        assert dict(meters.summary()) == dict(self.counted(1.0).summary())

    def test_metric_objects_are_merged_with_what_the_other_saw(self) -> None:
        first, second = (AverageMeterCollection(capture_object=capture) for _ in range(2))
        first.update({"auc": self.metric(1, 2)})
        second.go_on_from(first.summary())
        assert second.summary().objects["auc"].value() == first.summary().objects["auc"].value()
        second.update({"auc": self.metric(3)})
        assert second.summary()["auc"] == 2

    def test_a_collection_without_metric_objects_refuses_them(self) -> None:
        first = AverageMeterCollection(capture_object=capture)
        first.update({"auc": self.metric(1)})
        with pytest.raises(TypeError, match="metric `auc` is a metric object"):
            AverageMeterCollection().go_on_from(first.summary())

    def test_batches_that_others_counted_may_be_skipped(self) -> None:
        meters = self.counted(1.0)
        meters.skip_to(7)
        assert (meters.num_batches, meters.summary()["batch_count"]) == (7, 7)
        assert (meters.summary()["loss"], meters.summary()["num_samples"]) == (1.0, 1)
        meters.update({"loss": 3.0})
        assert meters.num_batches == 8


def test_what_is_held_back_counts_only_once_it_is_asked_for() -> None:
    meters, loss = AverageMeterCollection(), FakeTensor(2.0)
    meters.add_pending({"loss": loss}, n=3)
    meters.add_pending({"loss": 4.0}, n=1)
    loss.values[0] = 100.0  # user code goes on with the tensor that it gave
    assert (meters.num_batches, meters.n, dict(meters.summary())) == (0, 0, {"batch_count": 0, "num_samples": 0})
    meters.count_pending()
    meters.count_pending()
    assert (meters.num_batches, meters.n, meters.summary()["loss"]) == (2, 4, 2.5)
    meters.add_pending({"loss": 9.0})
    meters.drop_pending()
    meters.count_pending()
    assert meters.summary()["loss"] == 2.5


def test_a_metric_may_have_a_weight_of_its_own() -> None:
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0, "hits": 0.5, "batch_weight_of_hits": 3}, n=4)
    meters.update({"loss": 2.0, "hits": 0.0, "batch_weight": 1, "batch_weight_of_hits": 1}, n=4)
    assert meters.summary() == {
        "batch_count": 2,
        "num_samples": 8,
        "loss": 6 / 5,
        "last_loss": 2.0,
        "hits": 1.5 / 4,
        "last_hits": 0.0,
    }


def test_a_weight_that_is_a_tensor_waits_with_the_value() -> None:
    reads: list[int] = []

    def read(tensors: list[Any]) -> list[float]:
        reads.append(len(tensors))
        return [float(tensor) for tensor in tensors]

    meters = AverageMeterCollection(to_floats=read)
    for value, weight in ((1.0, FakeTensor(3)), (math.nan, FakeTensor(0)), (5.0, 1)):
        meters.update({"loss": FakeTensor(value), "batch_weight_of_loss": weight})
    assert not reads
    summary = meters.summary()
    assert (summary["loss"], summary["last_loss"], reads) == (2.0, 5.0, [5])


@pytest.mark.parametrize("wrong", [-1.0, math.nan, FakeTensor(-2)])
def test_a_weight_of_a_metric_that_is_none_is_refused(wrong: Any) -> None:
    def average() -> MetricSummary:
        meters = AverageMeterCollection()
        meters.update({"loss": FakeTensor(1.0), "batch_weight_of_loss": wrong})
        return meters.summary()

    with pytest.raises(ValueError, match="`batch_weight_of_loss="):
        average()


# ------------------------------------------------------------------------------------------------ tallies


def summed(*batches: tuple[dict[str, Any], int]) -> AverageMeterCollection:
    meters = AverageMeterCollection()
    for metrics, n in batches:
        meters.update(metrics, n)
    return meters


def test_a_tally_is_what_a_summary_of_the_same_batches_would_be() -> None:
    meters = summed(({"loss": 0.5, "iou": FakeTensor(0.25)}, 32), ({"loss": FakeTensor(0.2), "tokens": 7}, 64))
    found, expected = meters.summary_of(*meters.tally()), meters.summary()
    assert found == {name: value for name, value in expected.items() if name != "batch_count"}
    assert found.totals == expected.totals


def test_a_tally_has_what_waits_as_it_will_be_counted_and_changes_nothing() -> None:
    meters = summed(({"loss": 0.5}, 32))
    meters.add_pending({"loss": FakeTensor(0.1), "batch_weight": 5}, 16)
    meters.add_pending({"loss": FakeTensor(0.2), "batch_weight_of_loss": 3.0, "other": 2.0}, 8)
    tally = meters.tally()
    assert meters.summary() == {"batch_count": 1, "num_samples": 32, "loss": 0.5, "last_loss": 0.5}
    assert meters.tally() == tally
    meters.count_pending()
    after, found = meters.summary(), meters.summary_of(*tally)
    assert found.totals == after.totals
    assert (found["num_samples"], found["last_loss"]) == (56, 0.2)


def test_a_batch_without_weight_is_left_out_of_a_tally_whatever_it_says() -> None:
    meters = summed(({"loss": 1.0}, 4))
    meters.add_pending({"loss": math.nan}, 0)
    assert meters.summary_of(*meters.tally()).totals == {"loss": (4.0, 4.0)}


@pytest.mark.parametrize("value", ["text", None, numpy.ones(2)])
def test_what_is_no_metric_is_refused_before_it_waits(value: Any) -> None:
    meters = summed(({"loss": 1.0}, 4))
    with pytest.raises((TypeError, ValueError), match="`other`"):
        meters.add_pending({"loss": 3.0, "other": value}, 4)
    meters.count_pending()
    assert meters.tally() == (("loss",), [4.0, 4.0, 4.0, 1.0])


def test_a_batch_that_is_refused_leaves_those_that_wait() -> None:
    meters = AverageMeterCollection()
    meters.add_pending({"loss": 3.0}, 4)
    with pytest.raises(TypeError, match="`loss`"):
        meters.update({"loss": "text"}, 4)
    meters.update({"loss": 1.0}, 4)
    assert meters.summary().totals == {"loss": (4.0, 4.0)}
    meters.count_pending()
    assert meters.summary().totals == {"loss": (16.0, 8.0)}


def test_sums_of_others_leave_the_last_value_as_it_is_seen_here() -> None:
    meters, others = summed(({"loss": FakeTensor(3.0)}, 1)), summed(({"loss": 5.0, "iou": 1.0}, 3))
    meters.go_on_from(others.summary())
    assert meters.summary() == {
        "batch_count": 1,
        "num_samples": 4,
        "loss": 4.5,
        "last_loss": 3.0,
        "iou": 1.0,
        "last_iou": 1.0,
    }
