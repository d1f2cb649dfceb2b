"""Pure: how far an epoch was when a run left it at a step, and the metrics of the ranks up to that step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.numbers.meters import MetricSummary

_BY_RANK = ("by_rank", "lost")


@dataclass(frozen=True)
class BegunEpoch:
    """An epoch that a run left before its end.

    Attributes:
        num_steps: Number of batches of the epoch that each worker has trained on.
        epoch_idx: Index of the epoch, from 0.
        by_rank: Metrics of each rank.
        lost: Metrics of ranks that were lost before the run left the epoch.
        seconds: Seconds that the epoch had been trained.
        global_step: Number of batches that each worker has trained on in all epochs.
        is_exhausted: True if all batches are done, but not yet what follows the last one.
        owes_validation: True if the run validates at this step, but was left before that.
        objects: Names of metric objects, which only the processes that measured have.
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
        """Return the epoch that the ranks left.

        Args:
            states: The `RunState` of each rank.
            **more: Further attributes.
        """
        first = states[0]
        by_rank = tuple(_without_objects(each.metrics) for each in states)
        lost = tuple(first.lost.values())
        more["objects"] = () if first.metrics is None else tuple(first.metrics.objects)
        return BegunEpoch(first.num_steps, first.epoch_idx, by_rank, lost, is_exhausted=first.is_exhausted, **more)

    def for_rank(self, rank: int, num_ranks: int) -> BegunEpoch:
        """Return the epoch with only the metrics that one rank counts. The new group may have any size."""
        return replace(self, by_rank=self.by_rank[rank::num_ranks])

    def as_data(self) -> dict[str, Any]:
        """Return the epoch in types that JSON has. Floats keep every bit."""
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
        """Return the epoch that `as_data` wrote.

        Raises:
            ValueError: The data are damaged.
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
    """Return metrics in types that JSON has. Floats keep every bit."""
    return [_as_data(each) for each in summaries]


def summaries_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[MetricSummary, ...]:
    """Return the metrics that `summaries_as_data` wrote.

    Raises:
        KeyError, TypeError, ValueError: The data are damaged.
    """
    return tuple(map(_from_data, data))


def _without_objects(metrics: MetricSummary | None) -> MetricSummary:
    """Return metrics without metric objects, which the sidecar of a checkpoint does not hold."""
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
    """Return a number in a form that keeps its bits. JSON has no infinity and no NaN, so floats become hex text."""
    return value.hex() if isinstance(value, float) else int(value)


def _unpacked(value: Any) -> float:
    return float.fromhex(value) if isinstance(value, str) else value
