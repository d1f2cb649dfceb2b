from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from raysgd.core.numbers.meters import MetricSummary
from raysgd.core.numbers.results import Metrics, as_number, merge, with_lost

NO_NUMBERS = (np.str_("a"), np.bytes_(b"a"), np.datetime64("2026"), np.timedelta64(1, "s"), np.array("a"))


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


def test_n_workers_report_what_one_process_would() -> None:
    samples = [0.1, 0.2, 0.3, 0.7, 1e6, -1e6, 0.5]
    shares = [samples[0::3], samples[1::3], samples[2::3]]
    workers = [averaged(len(share), loss=(math.fsum(share), len(share))) for share in shares]
    assert merge(workers)["loss"] == pytest.approx(math.fsum(samples) / len(samples))


def replaced(worker: MetricSummary, **values: Any) -> MetricSummary:
    """A worker whose user replaced values that the library averaged."""
    worker.update(values)
    return worker


EMPTY = MetricSummary({"num_samples": 0, "loss": math.nan}, {"loss": (0.0, 0)})
UNBOUND = [averaged(1, a=(math.inf, 1), b=(math.inf, 1)), averaged(1, a=(-math.inf, 1), b=(1.0, 1))]
OBJECTS = [MetricSummary({"num_samples": 1, "hits": 0.5}, objects={"hits": Counter(count)}) for count in (3, 4)]
MERGED: dict[str, tuple[list[MetricSummary], str, Any]] = {
    "a worker that did not count": ([plain(num_samples=3), plain(loss=1.0)], "num_samples", math.nan),
    "the exact total, not the rounded mean times samples": ([averaged(3, loss=(0.1, 3))], "loss", 0.1 / 3),
    "what the user replaced": (
        [replaced(averaged(2, loss=(2.0, 2)), loss=10.0), averaged(2, loss=(4.0, 2))],
        "loss",
        6.0,
    ),
    "what the user computed": ([plain(num_samples=3, score=1.0), plain(num_samples=1, score=5.0)], "score", 2.0),
    "the same without samples": ([plain(score=1.0), plain(score=2.0)], "score", 1.5),
    **{
        f"{name} is a plain mean": (
            [plain(num_samples=9, loss=1.0, **{name: 4}), plain(num_samples=1, loss=1.0, **{name: 2})],
            name,
            3.0,
        )
        for name in ("batch_count", "last_loss", "epoch")
    },
    "a metric that is called like a last value": (
        [averaged(3, last_token=(3.0, 3)), averaged(1, last_token=(5.0, 1))],
        "last_token",
        2.0,
    ),
    "the same of the user": (
        [plain(num_samples=3, last_token=1.0), plain(num_samples=1, last_token=5.0)],
        "last_token",
        2.0,
    ),
    "a metric beside one whose last value it might be": (
        [averaged(3, token=(3.0, 3), last_token=(3.0, 3)), averaged(1, token=(1.0, 1), last_token=(5.0, 1))],
        "last_token",
        2.0,
    ),
    "NaN on one worker": ([averaged(1, loss=(math.nan, 1)), averaged(1, loss=(1.0, 1))], "loss", math.nan),
    "infinities that cancel": (UNBOUND, "a", math.nan),
    "one infinity": (UNBOUND, "b", math.inf),
    "a worker without samples": ([EMPTY, averaged(2, loss=(4.0, 2))], "loss", 2.0),
    "a worker none of whose samples counted": (
        [MetricSummary({"num_samples": 4, "loss": math.nan}, {"loss": (0.0, 0.0)}), averaged(2, loss=(4.0, 2))],
        "loss",
        2.0,
    ),
    "no samples at all": ([plain(num_samples=0, loss=1.0)], "loss", math.nan),
    "a metric that one worker lacks": ([plain(num_samples=2), plain(num_samples=2, b=7.0)], "b", 7.0),
    **{
        f"no number, {value!r}": ([plain(num_samples=1, x=value), plain(num_samples=1, x="other")], "x", value)
        for value in ("text", {"mean_fwd_s": 1.0}, [1, 2], None)
    },
    "no number on another worker": ([plain(x=1.0), plain(x="?")], "x", 1.0),
    "metric objects, merged before they are read": (OBJECTS, "hits", 7),
    "truth values": ([plain(num_samples=1, done=True), plain(num_samples=3, done=False)], "done", 0.25),
}


@pytest.mark.parametrize(("workers", "name", "expected"), MERGED.values(), ids=MERGED)
def test_metrics_are_merged_by_name(workers: list[MetricSummary], name: str, expected: Any) -> None:
    before = [dict(worker) for worker in workers]
    assert repr(merge(workers)[name]) == repr(expected), "to the last bit, and NaN is NaN"
    assert repr([dict(worker) for worker in workers]) == repr(before)


def test_samples_that_no_worker_counted_are_in_no_result() -> None:
    assert "num_samples" not in merge([plain(loss=1.0), plain(loss=2.0)])


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
        (np.complex64(1j), 1j),
        (Decimal("0.5"), 0.5),
        ("1", None),
        (None, None),
        *((each, None) for each in NO_NUMBERS),
    ],
)
def test_numbers_are_what_has_one_value(value: Any, expected: Any) -> None:
    assert as_number(value) == expected
    assert type(as_number(value)) is type(expected)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_numpys_values_that_are_no_numbers_are_those_of_the_first_worker(value: Any, num_workers: int) -> None:
    workers = [plain(num_samples=2, value=each) for each in (value, "other")][:num_workers]
    assert merge(workers)["value"] is value


class TestMetrics:
    def test_the_counts_of_the_library_have_types_and_the_rest_is_a_dict(self) -> None:
        result = merge([MetricSummary({"epoch": 2, "batch_count": 3, "num_samples": 12, "train_loss": 0.5})])
        assert (result.num_samples, result.epoch, result.batch_count) == (12, 2, 3)
        assert json.loads(json.dumps(result)) == result == pickle.loads(pickle.dumps(result))
        assert repr(result) == repr(dict(result))

    def test_a_count_that_is_not_there_is_missed_by_its_name(self) -> None:
        with pytest.raises(AttributeError, match=r"no 'epoch'\. Available: 'num_samples', 'val_loss'"):
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
