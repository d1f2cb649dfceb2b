"""The metric objects that are given under one name, and what they have seen: captured, or as numbers in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from raysgd._numbers.tally import Flat
from raysgd._numbers.weights import weight_of

logger = logging.getLogger(__name__)


class CapturedMetric(Protocol):
    """The state of a metric object, apart from the object that goes on counting."""

    def value(self) -> Any:
        """Compute the metric from this state alone."""
        ...

    def merged_with(self, others: Sequence[Any], /) -> Any:
        """Return the state of one metric that saw everything these states saw."""
        ...


CaptureObject = Callable[[Any], CapturedMetric]


class FlatObjects(Protocol):
    """Makes rows of numbers of what metric objects have seen, and lets them forget."""

    def flat(self, metric: Any) -> Flat | None:
        """Return the state of a metric object, or of a captured one, as numbers; None where it has no fixed size."""
        ...

    def captured_like(self, metric: Any, flat: Flat) -> CapturedMetric | None:
        """Return such a state of a metric object like this one; None where it is none of one like this."""
        ...

    def remember_all(self, metrics: Iterable[Any]) -> Callable[[], None]:
        """Remember what metric objects have seen; return what lets them forget the rest."""
        ...


class ObjectMeter:
    """The metric object last seen under one name, and what was captured of it so far."""

    __slots__ = ("_capture", "_captured", "_flat", "_live", "_name", "weight_name")

    def __init__(self, name: str, capture: CaptureObject) -> None:
        self._name, self.weight_name = name, weight_of(name)
        self._capture = capture
        self._live: Any = None
        self._captured: CapturedMetric | None = None
        self._flat: tuple[CapturedMetric, Flat | None] | None = None  # of what was captured

    @property
    def live(self) -> Any:
        """The object, if it was seen since it was captured last."""
        return self._live

    def drop(self) -> None:
        """Let the object forget what it has seen."""
        if self._live is not None:
            self._capture(self._live)

    def flat(self, objects: FlatObjects) -> Flat | None:
        """Return what was captured and what the object has seen since, as numbers; None if that has no fixed size."""
        states = [] if self._captured is None else [self._flat_of_captured(self._captured, objects)]
        states += [] if self._live is None else [objects.flat(self._live)]
        flats = [state for state in states if state is not None]
        if len(flats) < len(states):
            return None
        layout = tuple((meaning, len(numbers)) for meaning, numbers in flats)
        return layout, [number for _, numbers in flats for number in numbers]

    def _flat_of_captured(self, state: CapturedMetric, objects: FlatObjects) -> Flat | None:
        if self._flat is None or self._flat[0] is not state:
            self._flat = state, objects.flat(state)
        return self._flat[1]

    def captured_like(self, flat: Flat, objects: FlatObjects) -> CapturedMetric | None:
        """Return what `flat` of another one said; None where that one is another kind of metric."""
        like, (layout, numbers) = self._live if self._captured is None else self._captured, flat
        states: list[CapturedMetric] = []
        for meaning, length in layout:
            state, numbers = objects.captured_like(like, (meaning, numbers[:length])), numbers[length:]
            if state is None:
                return None
            states.append(state)
        merged: CapturedMetric = states[0].merged_with(states[1:])
        return merged

    def add(self, value: Any, weight: int | float) -> None:
        if not is_metric_object(type(value)):
            raise TypeError(
                f"metric `{self._name}` was a metric object in an earlier batch and is a "
                f"`{type(value).__name__}` now: report the object in every batch, or use two names."
            )
        self._live = value

    def add_captured(self, state: CapturedMetric) -> None:
        """Count what was captured elsewhere."""
        self._captured = state if self._captured is None else self._captured.merged_with([state])

    def captured(self, already: dict[int, CapturedMetric]) -> CapturedMetric:
        """Capture the object if it was seen since the last time.

        Args:
            already: What this summary captured, by the object's id: capturing resets the object, so an object
                that is known by two names must be captured once.
        """
        if self._live is not None:
            state = already.get(id(self._live)) or already.setdefault(id(self._live), self._capture(self._live))
            self._captured = state if self._captured is None else self._captured.merged_with([state])
            self._live = None
        assert self._captured is not None
        return self._captured


def is_metric_object(kind: type) -> bool:
    return hasattr(kind, "merge_state") and hasattr(kind, "compute")


def value_here(name: str, state: CapturedMetric) -> Any:
    """Compute a metric on this process's share, which may be too small for it."""
    try:
        return state.value()
    except Exception as error:  # the merged metric is what counts, and computing that one raises
        logger.warning("metric `%s` has no value on the share of this worker alone: %s", name, error)
        return float("nan")
