"""Preprocessors for the results that a callback receives: a list with each worker's dict of metrics, by rank.

Preprocessors do not modify their input.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from raysgd.core.arguments import check_kind

logger = logging.getLogger(__name__)

Results = list[dict[str, Any]]
_NUMBERS = (int, float, np.float32, np.float64, np.int32, np.int64)


class ResultsPreprocessor(abc.ABC):
    """Transforms the results that a callback receives."""

    @abc.abstractmethod
    def preprocess(self, results: Results) -> Results:
        """Return the results to pass to the callback.

        Args:
            results: The metrics of all workers, by rank.
        """


class SequentialResultsPreprocessor(ResultsPreprocessor):
    """Applies several preprocessors, from left to right."""

    def __init__(self, preprocessors: Sequence[ResultsPreprocessor]) -> None:
        self.preprocessors = list(preprocessors)

    def preprocess(self, results: Results) -> Results:
        for preprocessor in self.preprocessors:
            results = preprocessor.preprocess(results)
        return results


class IndexedResultsPreprocessor(ResultsPreprocessor):
    """Selects the results of some workers, in the given order.

    A worker that has reported before and no longer does, because the group got smaller, is left out.

    Args:
        indices: One rank, several ranks, or None for all.

    Raises:
        TypeError: `indices` has another type.
        ValueError: `indices` is empty.
    """

    def __init__(self, indices: int | Iterable[int] | None) -> None:
        self._indices = _ranks(indices)
        self._most_results = 0

    def preprocess(self, results: Results) -> Results:
        self._most_results = max(self._most_results, len(results))
        if self._indices is None:
            return results
        gone = range(len(results), self._most_results)
        return [results[index] for index in self._indices if index not in gone]


def _ranks(indices: int | Iterable[int] | None) -> list[int] | None:
    if indices is None:
        return None
    if isinstance(indices, int):
        return [indices]
    check_kind("indices", indices, Iterable, "a rank, several of them, or None for all")
    ranks = list(indices)
    if not ranks:
        raise ValueError("`indices` is empty: need at least one rank, or None for all.")
    if not all(isinstance(rank, int) for rank in ranks):
        raise TypeError(f"`indices={ranks!r}`: ranks are integers.")
    return ranks


class ExcludedKeysResultsPreprocessor(ResultsPreprocessor):
    """Removes some metrics from every worker's results.

    Args:
        excluded_keys: The keys to remove; None to remove nothing.
    """

    def __init__(self, excluded_keys: Iterable[str] | None = None) -> None:
        self._excluded = frozenset(excluded_keys or ())

    def preprocess(self, results: Results) -> Results:
        return [{key: value for key, value in result.items() if key not in self._excluded} for result in results]


class _Aggregate(ResultsPreprocessor):
    """Computes one number from all workers' values and adds it to every worker's results as `<prefix>(<key>)`."""

    _prefix: str

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        self._keys = None if keys is None else list(keys)

    def preprocess(self, results: Results) -> Results:
        if not results:
            return results
        added = {}
        for key in self._keys if self._keys is not None else _keys_of(results):
            values = _valid(results, key)
            if values is not None:
                added[f"{self._prefix}({key})"] = self._aggregate(values, results)
        return [{**result, **added} for result in results]

    @abc.abstractmethod
    def _aggregate(self, values: Sequence[float], results: Results) -> float:
        """Aggregate the workers' values into one number. At least one value is not NaN."""


class AverageResultsPreprocessor(_Aggregate):
    """Adds the mean of metrics over the workers to every worker's results, as `avg(<key>)`.

    Args:
        keys: The keys to average; None for all.
    """

    _prefix = "avg"

    def _aggregate(self, values: Sequence[float], results: Results) -> float:
        return float(np.nanmean(values))


class MaxResultsPreprocessor(_Aggregate):
    """Adds the maximum of metrics over the workers to every worker's results, as `max(<key>)`.

    Args:
        keys: The keys to aggregate; None for all.
    """

    _prefix = "max"

    def _aggregate(self, values: Sequence[float], results: Results) -> float:
        return float(np.nanmax(values))


class WeightedAverageResultsPreprocessor(_Aggregate):
    """Adds the weighted mean of metrics over the workers, as `weight_avg_<weight_key>(<key>)`.

    Args:
        keys: The keys to average; None for all.
        weight_key: Key of each worker's weight. All workers have equal weight if `weight_key` is None, if any worker's
            weight is missing or not a number, or if the weights add up to 0.
    """

    def __init__(self, keys: Iterable[str] | None = None, weight_key: str | None = None) -> None:
        super().__init__(keys)
        self._weight_key = weight_key
        self._prefix = f"weight_avg_{weight_key}"

    def _aggregate(self, values: Sequence[float], results: Results) -> float:
        weights = self._weights(results)
        pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
        total = sum(weight for _, weight in pairs)
        if not total:
            return float(np.nanmean(values))
        return sum(value * weight for value, weight in pairs) / total

    def _weights(self, results: Results) -> list[float]:
        weights = [result.get(self._weight_key) for result in results] if self._weight_key is not None else []
        if weights and all(_is_number(weight) for weight in weights):
            return [float(weight) for weight in weights if weight is not None]
        logger.warning(
            "Averaging weight `%s` is not reported by all workers, or is not a number. Use equal weight instead.",
            self._weight_key,
        )
        return [1.0] * len(results)


def _keys_of(results: Results) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result))


def _valid(results: Results, key: str) -> list[float] | None:
    """Return the value of a metric on each worker, or NaN for a worker whose value is missing or not a number.

    If no worker has a usable value, warn and return None.
    """
    if not any(key in result for result in results):
        logger.warning("`%s` is not reported from workers, so it is ignored.", key)
        return None
    values = [float(result[key]) if _is_number(result.get(key)) else math.nan for result in results]
    if all(math.isnan(value) for value in values):
        logger.warning("`%s` value type is not valid, so it is ignored.", key)
        return None
    return values


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS
