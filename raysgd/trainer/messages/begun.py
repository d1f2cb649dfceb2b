"""`BegunEpoch`: the progress of an epoch that a run left unfinished, with each rank's metrics so far.

A later run continues the epoch from this progress. This module reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.arguments import is_saved_count
from raysgd.core.numbers.meters import MetricSummary

_BY_RANK = ("by_rank", "lost")
_DAMAGES = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors that damaged data may cause."""


@dataclass(frozen=True)
class BegunEpoch:
    """The progress of an epoch that a run left unfinished, from which another run can continue the epoch.

    Attributes:
        num_steps: Number of the epoch's batches that each worker has trained on.
        epoch_idx: Index of the epoch, starting at 0.
        by_rank: Metrics that each rank has measured in this epoch.
        lost: Metrics of ranks that were lost before the run left the epoch.
        seconds: Seconds spent on training the epoch so far.
        global_step: Number of batches that each worker has trained on over all epochs.
        is_exhausted: True if all batches are done, but user code after the last batch may still have to run.
        owes_validation: True if a validation is due at this step but has not run yet.
        objects: Names of metrics that are objects, such as torchmetrics metrics. Their values exist only in the
            processes that measured them.
    """

    num_steps: int
    epoch_idx: int
    by_rank: tuple[MetricSummary, ...] = ()
    lost: tuple[MetricSummary, ...] = ()
    seconds: float = 0.0
    global_step: int = 0
    is_exhausted: bool = False
    owes_validation: bool = False
    objects: tuple[str, ...] = ()

    @staticmethod
    def of(states: Sequence[Any], **more: Any) -> BegunEpoch:
        """Create a `BegunEpoch` from the progress that the ranks reported.

        Args:
            states: The progress of each rank, as a `RunState`.
            **more: Values of other attributes.
        """
        first = states[0]
        by_rank = tuple((each.metrics or MetricSummary()).without_objects() for each in states)
        lost = tuple(first.lost.values())
        more["objects"] = () if first.metrics is None else tuple(first.metrics.objects)
        return BegunEpoch(first.num_steps, first.epoch_idx, by_rank, lost, is_exhausted=first.is_exhausted, **more)

    def as_data(self) -> dict[str, Any]:
        """Return this epoch's progress as data that can be written as JSON. Floats keep their exact values."""
        return {
            "num_steps": self.num_steps,
            "epoch_idx": self.epoch_idx,
            **{name: summaries_as_data(getattr(self, name)) for name in _BY_RANK},
            "seconds": self.seconds,
            "global_step": self.global_step,
            "is_exhausted": self.is_exhausted,
            "owes_validation": self.owes_validation,
            "objects": [*self.objects],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> BegunEpoch:
        """Create a `BegunEpoch` from the result of `as_data`.

        Raises:
            ValueError: The data is damaged.
        """
        try:
            return BegunEpoch(
                _count(data["num_steps"]),
                _count(data["epoch_idx"]),
                seconds=float(data["seconds"]),
                global_step=_count(data["global_step"]),
                is_exhausted=bool(data["is_exhausted"]),
                owes_validation=bool(data.get("owes_validation")),
                objects=tuple(map(str, data.get("objects", ()))),
                **{name: summaries_from_data(data[name]) for name in _BY_RANK},
            )
        except _DAMAGES as error:
            raise ValueError(f"The progress of an epoch beside the checkpoint is damaged: {error!r}") from error


def summaries_as_data(summaries: Iterable[MetricSummary]) -> list[dict[str, Any]]:
    """Return metrics as data that can be written as JSON.

    Floats keep their exact values. Metrics whose value is not a number are left out, but their totals are included.
    """
    return [_as_data(each) for each in summaries]


def summaries_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[MetricSummary, ...]:
    """Return the metrics that `summaries_as_data` converted to data.

    Raises:
        Exception: The data is damaged, as in `_DAMAGES`.
    """
    return tuple(map(_from_data, data))


OpenSteps = tuple[int, tuple[MetricSummary, ...]]
"""Step of a checkpoint, and each rank's metrics of steps that loggers have not received yet."""


def open_steps_from_data(data: Sequence[Any] | None) -> OpenSteps | None:
    """Return the open steps in a sidecar, or None if there are none.

    Raises:
        ValueError: The data is damaged.
    """
    if not data:
        return None
    step, *by_rank = data
    try:
        return _count(step), summaries_from_data(by_rank)
    except _DAMAGES as error:
        raise ValueError(f"The metrics of steps in the file beside the checkpoint are damaged: {error!r}") from error


def _as_data(metrics: MetricSummary) -> dict[str, Any]:
    values = {str(name): _packed(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {"values": values, "totals": {str(name): _packed_all(total) for name, total in metrics.totals.items()}}


def _from_data(data: Mapping[str, Any]) -> MetricSummary:
    totals = {name: (_unpacked(total), _unpacked(count)) for name, (total, count) in data["totals"].items()}
    return MetricSummary({name: _unpacked(value) for name, value in data["values"].items()}, totals)


def _packed_all(values: Iterable[Any]) -> list[Any]:
    return [_packed(value) for value in values]


def _packed(value: float) -> int | str:
    """Convert a number to a form that JSON stores exactly.

    Floats become hexadecimal strings, because JSON has no infinity or NaN.
    """
    return value.hex() if isinstance(value, float) else int(value)


def _count(value: Any) -> int:
    if not is_saved_count(value):
        raise ValueError(f"{value!r:.50} is not a count")
    return int(value)


def _unpacked(value: Any) -> float:
    number = float.fromhex(value) if isinstance(value, str) else value
    if type(number) not in (int, float):
        raise TypeError(f"a number is a `{type(number).__name__}`")
    float(number)  # raises OverflowError for a number that could not be added to others
    return number
