from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from raysgd.train.fit.recorder import make_stop


def always(trial_id: str, result: Mapping[str, Any]) -> bool:
    return True


def late(trial_id: str, result: Mapping[str, Any]) -> bool:
    return bool(result["n"] >= 3)


@pytest.mark.parametrize(
    ("stop", "stops_at"),
    [
        (None, None),
        ({"n": 2}, 2),
        ({"n": 2, "m": 1}, 2),
        ({"nested/n": 3}, 3),
        ({"missing": 1}, None),
        ({}, None),
        (late, 3),
        (lambda trial_id, result: result["n"] == 1, 1),
        (partial(always), 0),
        ([{"n": 3}, {"n": 1}], 1),
    ],
)
def test_conditions(stop: Any, stops_at: int | None) -> None:
    condition = make_stop(stop)
    met = [n for n in range(5) if condition("id", {"n": n, "nested": {"n": n}})]
    assert (met[0] if met else None) == stops_at


def test_a_stopper_of_ray_tune_is_asked_for_both() -> None:
    from ray.tune.stopper import MaximumIterationStopper, Stopper

    class AtOnce(Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return True

    assert make_stop(AtOnce())("id", {})
    condition = make_stop(MaximumIterationStopper(2))
    assert [condition("id", {}) for _ in range(3)] == [False, True, True]


def test_a_metric_that_is_never_reported_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    condition = make_stop({"accuracy": 0.9})
    for _ in range(3):
        condition("id", {"loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "`RunConfig(stop=...)` names the metric 'accuracy', which this report does not have. It has: loss"
    ]


@pytest.mark.parametrize(
    ("stop", "error", "text"),
    [
        ({"n": "2"}, ValueError, "the name of a metric and a number"),
        ({"n": float("nan")}, ValueError, "the name of a metric and a number"),
        ({1: 2}, ValueError, "the name of a metric and a number"),
        (lambda result: True, ValueError, "a function of two arguments"),
        ("n", TypeError, "need a dict of metrics"),
        (7, TypeError, "need a dict of metrics"),
        (dict, TypeError, "need a dict of metrics"),
    ],
)
def test_what_is_not_a_condition(stop: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_stop(stop)


def test_a_condition_gets_a_copy() -> None:
    def changing(trial_id: str, result: Any) -> bool:
        result["n"] = 7
        return False

    conditions: Callable[..., bool] = make_stop([changing])
    result = {"n": 1}
    conditions("id", result)
    assert result == {"n": 1}
