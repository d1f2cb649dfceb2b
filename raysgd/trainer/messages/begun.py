"""`BegunEpoch`: progress of an epoch that a run left unfinished, and each rank's metrics so far. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.numbers.meters import MetricSummary

_BY_RANK = ("by_rank", "lost")


@dataclass(frozen=True)
class BegunEpoch:
    """An epoch that a run left unfinished.

    Attributes:
        num_steps: Number of the epoch's batches that each worker has trained on.
        epoch_idx: Index of the epoch, starting at 0.
        by_rank: Metrics of each rank.
        lost: Metrics of ranks that were lost before the run left the epoch.
        seconds: Training time of the epoch so far.
        global_step: Number of batches that each worker has trained on over all epochs.
        is_exhausted: True if all batches are done, but user code after the last batch may still have to run.
        owes_validation: True if a validation is due at this step but has not run.
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
        """Create a `BegunEpoch` from the ranks' progress.

        Args:
            states: The `RunState` of each rank.
            **more: Values of further attributes.
        """
        first = states[0]
        by_rank = tuple(_without_objects(each.metrics) for each in states)
        lost = tuple(first.lost.values())
        more["objects"] = () if first.metrics is None else tuple(first.metrics.objects)
        return BegunEpoch(first.num_steps, first.epoch_idx, by_rank, lost, is_exhausted=first.is_exhausted, **more)

    def for_rank(self, rank: int, num_ranks: int) -> BegunEpoch:
        """Return a copy with only the old ranks' metrics that rank `rank` of a new group takes over."""
        return replace(self, by_rank=self.by_rank[rank::num_ranks])

    def as_data(self) -> dict[str, Any]:
        """Return the epoch as JSON-serializable data. Floats are exact."""
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
                int(data["num_steps"]),
                int(data["epoch_idx"]),
                seconds=float(data["seconds"]),
                global_step=int(data["global_step"]),
                is_exhausted=bool(data["is_exhausted"]),
                owes_validation=bool(data.get("owes_validation")),
                objects=tuple(map(str, data.get("objects", ()))),
                **{name: summaries_from_data(data[name]) for name in _BY_RANK},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"what stands of an epoch that was left is damaged: {error!r}") from error


def summaries_as_data(summaries: Iterable[MetricSummary]) -> list[dict[str, Any]]:
    """Return metrics as JSON-serializable data. Floats are exact."""
    return [_as_data(each) for each in summaries]


def summaries_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[MetricSummary, ...]:
    """Return metrics from the result of `summaries_as_data`.

    Raises:
        KeyError, TypeError, ValueError: The data is damaged.
    """
    return tuple(map(_from_data, data))


def _without_objects(metrics: MetricSummary | None) -> MetricSummary:
    """Return a copy of a rank's metrics without metric objects, which cannot be stored as JSON."""
    if metrics is None:
        return MetricSummary()
    return MetricSummary(
        {name: value for name, value in metrics.items() if name not in metrics.objects}, metrics.totals
    )


def _as_data(metrics: MetricSummary) -> dict[str, Any]:
    values = {str(name): _packed(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {"values": values, "totals": {str(name): _packed_all(total) for name, total in metrics.totals.items()}}


def _from_data(data: Mapping[str, Any]) -> MetricSummary:
    totals = {name: (_unpacked(total), _unpacked(count)) for name, (total, count) in data["totals"].items()}
    return MetricSummary({name: _unpacked(value) for name, value in data["values"].items()}, totals)


def _packed_all(values: Iterable[Any]) -> list[Any]:
    return [_packed(value) for value in values]


def _packed(value: float) -> int | str:
    """Return a number in an exact JSON form. Floats become hexadecimal strings, since JSON has no infinity or NaN."""
    return value.hex() if isinstance(value, float) else int(value)


def _unpacked(value: Any) -> float:
    return float.fromhex(value) if isinstance(value, str) else value
