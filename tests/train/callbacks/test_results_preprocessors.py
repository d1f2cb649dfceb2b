from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from raysgd.train.callbacks.results_preprocessors import (
    AverageResultsPreprocessor,
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    MaxResultsPreprocessor,
    ResultsPreprocessor,
    SequentialResultsPreprocessor,
    WeightedAverageResultsPreprocessor,
)

RESULTS = [{"a": 1, "b": 5.0, "n": 1}, {"a": np.float32(3), "n": 3}, {"a": 2, "b": "text", "n": 0}]


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        (IndexedResultsPreprocessor(1), RESULTS[1:2]),
        (IndexedResultsPreprocessor([2, 0]), [RESULTS[2], RESULTS[0]]),
        (IndexedResultsPreprocessor(range(2)), RESULTS[:2]),
        (IndexedResultsPreprocessor(None), RESULTS),
        (ExcludedKeysResultsPreprocessor(["b", "n"]), [{"a": 1}, {"a": 3}, {"a": 2}]),
        (ExcludedKeysResultsPreprocessor("b"), [{"a": 1, "n": 1}, {"a": 3, "n": 3}, {"a": 2, "n": 0}]),
        (ExcludedKeysResultsPreprocessor(None), RESULTS),
        (
            SequentialResultsPreprocessor([ExcludedKeysResultsPreprocessor("bn"), IndexedResultsPreprocessor(2)]),
            [{"a": 2}],
        ),
    ],
)
def test_what_a_callback_sees(preprocessor: ResultsPreprocessor, expected: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(RESULTS)
    assert preprocessor.preprocess(RESULTS) == expected
    assert before == RESULTS


@pytest.mark.parametrize(
    ("preprocessor", "added"),
    [
        (AverageResultsPreprocessor(["a"]), {"avg(a)": 2.0}),
        (AverageResultsPreprocessor(), {"avg(a)": 2.0, "avg(b)": 5.0, "avg(n)": 4 / 3}),
        (MaxResultsPreprocessor(["a", "b"]), {"max(a)": 3.0, "max(b)": 5.0}),
        (WeightedAverageResultsPreprocessor(["a"], "n"), {"weight_avg_n(a)": 2.5}),
        (WeightedAverageResultsPreprocessor(["b"], "n"), {"weight_avg_n(b)": 5.0}),
    ],
)
def test_what_is_added_for_every_worker(preprocessor: ResultsPreprocessor, added: dict[str, float]) -> None:
    before = copy.deepcopy(RESULTS)
    assert preprocessor.preprocess(RESULTS) == [{**result, **added} for result in RESULTS]
    assert before == RESULTS


@pytest.mark.parametrize("preprocessor", [AverageResultsPreprocessor(["c"]), MaxResultsPreprocessor(["c"])])
def test_a_key_that_nobody_reports_is_skipped_with_a_warning(
    preprocessor: ResultsPreprocessor, caplog: pytest.LogCaptureFixture
) -> None:
    assert preprocessor.preprocess(RESULTS) == RESULTS
    assert "`c` is not reported from workers" in caplog.text


def test_a_key_without_a_valid_value_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    results = [{"a": "x"}, {"a": None}]
    assert AverageResultsPreprocessor(["a"]).preprocess(results) == results
    assert "`a` value type is not valid" in caplog.text


@pytest.mark.parametrize("weight_key", [None, "b", "c"])
def test_without_usable_weights_all_count_alike(weight_key: str | None, caplog: pytest.LogCaptureFixture) -> None:
    preprocessor = WeightedAverageResultsPreprocessor(["a"], weight_key)
    [first, *_] = preprocessor.preprocess(RESULTS)
    assert first[f"weight_avg_{weight_key}(a)"] == 2.0
    assert "Averaging weight" in caplog.text
    assert "Use equal weight instead" in caplog.text


def test_weights_of_nothing_count_alike() -> None:
    [result] = WeightedAverageResultsPreprocessor(["a"], "n").preprocess([{"a": 4.0, "n": 0}])
    assert result["weight_avg_n(a)"] == 4.0


@pytest.mark.parametrize("preprocessor", [AverageResultsPreprocessor(), MaxResultsPreprocessor(["a"])])
def test_nothing_stays_nothing(preprocessor: ResultsPreprocessor) -> None:
    assert preprocessor.preprocess([]) == []


@pytest.mark.parametrize(("indices", "error"), [([], ValueError), (1.5, TypeError), (["a"], TypeError)])
def test_ranks_that_are_none_are_refused(indices: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`indices"):
        IndexedResultsPreprocessor(indices)


def test_a_rank_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError):
        IndexedResultsPreprocessor(7).preprocess(RESULTS)


def test_a_worker_that_is_lost_is_left_out_of_those_chosen() -> None:
    chosen = IndexedResultsPreprocessor([0, 2])
    assert chosen.preprocess(RESULTS) == [RESULTS[0], RESULTS[2]]
    assert chosen.preprocess(RESULTS[:2]) == [RESULTS[0]]
    assert chosen.preprocess(RESULTS) == [RESULTS[0], RESULTS[2]]


def test_nan_of_a_worker_is_left_out() -> None:
    [first, _] = AverageResultsPreprocessor(["a"]).preprocess([{"a": math.nan}, {"a": 2.0}])
    assert first["avg(a)"] == 2.0
