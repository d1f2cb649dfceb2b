"""The result of one pass: its values, and the sums, weights and metric objects that they were made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raysgd._numbers.object_meter import CapturedMetric

_ABSENT = object()


class MetricSummary(dict[str, Any]):
    """The result of one pass: a plain dict, which also knows what its means were made of.

    User code may edit the dict. An edited or removed value loses its sum and count, so that merging uses what
    the user put there and never resurrects what was replaced. Copies (`copy.copy`) and pickles keep
    everything; `dict.copy` and `dict(...)` give a bare dict.

    >>> summary = MetricSummary({"loss": 0.5, "accuracy": 1.0}, totals={"loss": (2.0, 4.0), "accuracy": (4.0, 4.0)})
    >>> summary["accuracy"] = 0.75
    >>> summary.totals
    {'loss': (2.0, 4.0)}
    """

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        totals: Mapping[str, tuple[float, float]] | None = None,
        objects: Mapping[str, CapturedMetric] | None = None,
    ) -> None:
        super().__init__(values)
        self._totals = dict(totals or {})
        self._objects = dict(objects or {})
        self._reported = {name: self.get(name, _ABSENT) for name in (*self._totals, *self._objects)}

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Float sum and count of each mean that still stands as it was computed."""
        return {name: total for name, total in self._totals.items() if self._stands(name)}

    @property
    def objects(self) -> dict[str, CapturedMetric]:
        """Captured state of each metric object whose value still stands as it was computed."""
        return {name: state for name, state in self._objects.items() if self._stands(name)}

    def _stands(self, name: str) -> bool:
        # By text: NaN equals itself then, also in a list, and also once a pickle made a new object of it.
        return name in self and repr(self[name]) == repr(self._reported[name])
