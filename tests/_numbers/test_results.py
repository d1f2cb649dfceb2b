from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from raysgd._numbers.meters import MetricSummary
from raysgd._numbers.results import Metrics, as_number, merge, with_lost


def plain(**values: Any) -> MetricSummary:
    """A worker whose user computed everything."""
    return MetricSummary(values)


def averaged(num_samples: int, **totals: tuple[float, float]) -> MetricSummary:
    """A worker whose metrics the library averaged: sum and count by name."""
    means = {name: total / count for name, (total, count) in totals.items()}
    return MetricSummary({"num_samples": num_samples, **means}, totals)


@dataclass
class Scalar:
    """Something like a 0-d tensor."""

    number: float
    ndim: int = 0

    def item(self) -> float:
        return self.number


@dataclass
class Counter:
    """A metric object that counts."""

    count: int

    def merged_with(self, others: Sequence[Counter]) -> Counter:
        return Counter(self.count + sum(other.count for other in others))

    def value(self) -> int:
        return self.count


def test_a_worker_that_did_not_count_makes_the_total_unknown() -> None:
    assert math.isnan(merge([plain(num_samples=3), plain(loss=1.0)])["num_samples"])
    assert "num_samples" not in merge([plain(loss=1.0), plain(loss=2.0)])


def test_n_workers_report_what_one_process_would() -> None:
    samples = [0.1, 0.2, 0.3, 0.7, 1e6, -1e6, 0.5]
    shares = [samples[0::3], samples[1::3], samples[2::3]]
    workers = [averaged(len(share), loss=(math.fsum(share), len(share))) for share in shares]
    assert merge(workers)["loss"] == pytest.approx(math.fsum(samples) / len(samples))


def test_the_exact_total_counts_rather_than_the_rounded_mean_times_samples() -> None:
    worker = averaged(3, loss=(0.1, 3))
    assert merge([worker])["loss"] == 0.1 / 3


def test_a_mean_that_the_user_replaced_counts_as_replaced() -> None:
    worker = averaged(2, loss=(2.0, 2))
    worker["loss"] = 10.0
    assert merge([worker, averaged(2, loss=(4.0, 2))])["loss"] == 6.0


def test_what_the_user_computed_counts_by_the_samples_beside_it() -> None:
    assert merge([plain(num_samples=3, score=1.0), plain(num_samples=1, score=5.0)])["score"] == 2.0


def test_without_samples_workers_count_alike() -> None:
    assert merge([plain(score=1.0), plain(score=2.0)])["score"] == 1.5


@pytest.mark.parametrize("name", ["batch_count", "last_loss", "epoch"])
def test_counters_and_last_values_are_plain_means(name: str) -> None:
    merged = merge([plain(num_samples=9, loss=1.0, **{name: 4}), plain(num_samples=1, loss=1.0, **{name: 2})])
    assert merged[name] == 3


def test_a_metric_that_is_called_like_a_last_value_counts_by_its_samples() -> None:
    merged = merge([averaged(3, last_token=(3.0, 3)), averaged(1, last_token=(5.0, 1))])
    assert merged["last_token"] == 2.0
    merged = merge([plain(num_samples=3, last_token=1.0), plain(num_samples=1, last_token=5.0)])
    assert merged["last_token"] == 2.0


def test_a_metric_beside_one_whose_last_value_it_might_be_counts_by_its_samples() -> None:
    merged = merge([averaged(3, token=(3.0, 3), last_token=(3.0, 3)), averaged(1, token=(1.0, 1), last_token=(5.0, 1))])
    assert merged["last_token"] == 2.0


def test_nan_on_one_worker_stays_nan() -> None:
    merged = merge([averaged(1, loss=(math.nan, 1)), averaged(1, loss=(1.0, 1))])
    assert math.isnan(merged["loss"])


def test_losses_without_bound_do_not_raise() -> None:
    merged = merge([averaged(1, a=(math.inf, 1), b=(math.inf, 1)), averaged(1, a=(-math.inf, 1), b=(1.0, 1))])
    assert math.isnan(merged["a"])
    assert merged["b"] == math.inf


def test_a_worker_without_samples_does_not_spoil_the_mean() -> None:
    empty = MetricSummary({"num_samples": 0, "loss": math.nan}, {"loss": (0.0, 0)})
    assert merge([empty, averaged(2, loss=(4.0, 2))])["loss"] == 2.0


def test_nobody_had_a_sample() -> None:
    assert math.isnan(merge([plain(num_samples=0, loss=1.0)])["loss"])


def test_a_metric_that_one_worker_lacks_is_averaged_over_the_others() -> None:
    merged = merge([plain(num_samples=2, a=1.0), plain(num_samples=2, a=3.0, b=7.0)])
    assert (merged["a"], merged["b"]) == (2.0, 7.0)


def test_a_single_worker_reports_what_two_workers_with_the_same_share_would() -> None:
    one = averaged(3, loss=(3.0, 3), last_loss=(0.5, 1))
    one = MetricSummary({"right": True, "epoch": 2, "text": "x", **one, "last_right": 1}, one.totals)
    alone, together = merge([one]), merge([one, one])
    assert alone == {**together, "num_samples": 3}
    assert list(alone) == list(together)
    assert {name: type(value) for name, value in alone.items()} == {
        name: type(value) for name, value in together.items()
    }


def test_names_come_in_the_order_in_which_they_are_first_met() -> None:
    assert list(merge([plain(b=1, num_samples=1), plain(a=1, c=1)])) == ["num_samples", "b", "a", "c"]


@pytest.mark.parametrize("value", ["text", {"mean_fwd_s": 1.0}, [1, 2], None])
def test_what_is_no_number_is_taken_from_the_first_worker(value: Any) -> None:
    assert merge([plain(num_samples=1, x=value), plain(num_samples=1, x="other")])["x"] == value


def test_one_worker_without_a_number_means_the_first_workers_value() -> None:
    assert merge([plain(x=1.0), plain(x="?")])["x"] == 1.0


def test_metric_objects_are_merged_before_they_are_read() -> None:
    workers = [
        MetricSummary({"num_samples": 1, "hits": 0.5}, objects={"hits": Counter(3)}),
        MetricSummary({"num_samples": 1, "hits": 0.1}, objects={"hits": Counter(4)}),
    ]
    assert merge(workers)["hits"] == 7


def test_booleans_become_shares() -> None:
    merged = merge([plain(num_samples=1, done=True), plain(num_samples=3, done=False)])
    assert merged["done"] == 0.25


def test_the_workers_own_metrics_stay_as_they_are() -> None:
    worker = averaged(2, loss=(4.0, 2))
    merge([worker, worker])
    assert worker == {"num_samples": 2, "loss": 2.0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (2.5, 2.5),
        (True, True),
        (Fraction(1, 2), Fraction(1, 2)),
        (np.float64(2.5), 2.5),
        (Scalar(1.5), 1.5),
        (Scalar(1.5, ndim=1), None),
        ("1", None),
        (None, None),
    ],
)
def test_numbers_are_what_has_one_value(value: Any, expected: Any) -> None:
    assert as_number(value) == expected
    assert type(as_number(value)) is type(expected)


class TestMetrics:
    def test_the_counts_of_the_library_have_types_and_the_rest_is_a_dict(self) -> None:
        result = merge([MetricSummary({"epoch": 2, "batch_count": 3, "num_samples": 12, "train_loss": 0.5})])
        assert (result.num_samples, result.epoch, result.batch_count) == (12, 2, 3)
        assert json.loads(json.dumps(result)) == result == pickle.loads(pickle.dumps(result))
        assert repr(result) == repr(dict(result))

    def test_a_count_that_is_not_there_is_missed_by_its_name(self) -> None:
        with pytest.raises(AttributeError, match="no 'epoch'; it has 'num_samples', 'val_loss'"):
            _ = merge([MetricSummary({"num_samples": 12, "val_loss": 0.5})]).epoch


# ------------------------------------------------------------------------------------------------ lost workers


def test_what_lost_workers_had_averaged_counts_as_if_the_worker_had_seen_it() -> None:
    own, lost = averaged(2, loss=(4.0, 2)), [averaged(3, loss=(9.0, 3)), averaged(5, loss=(5.0, 5), iou=(1.0, 4))]
    found = with_lost(own, lost, {"loss"})
    assert found == {"num_samples": 10, "loss": 1.8, "iou": 0.25}
    assert merge([found, own]) == merge([own, *lost, own])
    assert own == {"num_samples": 2, "loss": 2.0}


def test_what_user_code_computed_or_removed_is_not_changed_by_lost_workers() -> None:
    own = MetricSummary({"num_samples": 2, "loss": 7.0, "mine": 1.0, "iou": 0.5}, {"iou": (1.0, 2)})
    found = with_lost(own, [averaged(2, loss=(4.0, 2), gone=(1.0, 2), iou=(2.0, 2))], {"loss", "gone", "iou"})
    assert found == {"num_samples": 4, "loss": 7.0, "mine": 1.0, "iou": 0.75}


def test_a_result_that_is_none_of_the_librarys_stays_as_it_is() -> None:
    own = plain(num_samples=2, loss=1.0)
    assert with_lost(own, [averaged(2, loss=(4.0, 2))], {"loss"}) is own


def test_a_worker_that_never_had_a_sample_counts_those_of_lost_workers() -> None:
    found = with_lost(plain(num_samples=0, epoch=1), [averaged(2, loss=(4.0, 2))], ())
    assert found == {"num_samples": 2, "epoch": 1, "loss": 2.0}


def test_metric_objects_go_on_beside_the_sums_of_lost_workers() -> None:
    own = MetricSummary({"num_samples": 1, "hits": 3}, objects={"hits": Counter(3)})
    found = with_lost(own, [averaged(2, loss=(4.0, 2))], {"hits", "loss"})
    assert found == {"num_samples": 3, "hits": 3}
    assert found.objects == own.objects


def test_a_result_is_a_card_in_a_notebook() -> None:
    card = Metrics({"num_samples": 64, "train_loss": 1 / 3, "<b>": np.zeros(1000)})._repr_html_()
    assert "<th>train_loss</th><td>0.3333</td>" in card
    assert "<th>num_samples</th><td>64</td>" in card
    assert "<b>" not in card
    assert len(card) < 3000
