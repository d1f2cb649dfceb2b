"""Pure: an epoch that a run has left at a step: how far it was, and what the ranks had measured by then."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd._numbers.meters import MetricSummary

logger = logging.getLogger(__name__)

_BY_RANK = ("by_rank", "lost")


@dataclass(frozen=True)
class BegunEpoch:
    """Where an epoch was left.

    Attributes:
        num_steps: How many batches of it each worker has trained on.
        epoch_idx: Which pass over the data it is, from 0.
        by_rank: What each rank had measured.
        lost: What ranks had measured that were gone by then.
        seconds: How long it had been trained.
        global_step: How many batches each worker has trained on in all.
        is_exhausted: Whether no batch of it is left, only what follows the last one.
    """

    num_steps: int
    epoch_idx: int
    by_rank: tuple[MetricSummary, ...] = ()
    lost: tuple[MetricSummary, ...] = ()
    seconds: float = 0.0
    global_step: int = 0
    is_exhausted: bool = False

    @staticmethod
    def of(states: Sequence[Any], **more: Any) -> BegunEpoch:
        """Return where ranks are that say so themselves, each with a `RunState`."""
        first = states[0]
        by_rank = tuple(_without_objects(each.metrics) for each in states)
        lost = tuple(first.lost.values())
        return BegunEpoch(first.num_steps, first.epoch_idx, by_rank, lost, is_exhausted=first.is_exhausted, **more)

    def for_rank(self, rank: int, num_ranks: int) -> BegunEpoch:
        """Return the same with the metrics that one rank is to count, of a group of whatever size."""
        return replace(self, by_rank=self.by_rank[rank::num_ranks])

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it, to the last bit."""
        return {
            "num_steps": self.num_steps,
            "epoch_idx": self.epoch_idx,
            **{name: summaries_as_data(getattr(self, name)) for name in _BY_RANK},
            "seconds": self.seconds,
            "global_step": self.global_step,
            "is_exhausted": self.is_exhausted,
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> BegunEpoch:
        """Return what `as_data` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            return BegunEpoch(
                int(data["num_steps"]),
                int(data["epoch_idx"]),
                seconds=float(data["seconds"]),
                global_step=int(data["global_step"]),
                is_exhausted=bool(data["is_exhausted"]),
                **{name: summaries_from_data(data[name]) for name in _BY_RANK},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"what stands of an epoch that was left is damaged: {error!r}") from error


def summaries_as_data(summaries: Iterable[MetricSummary]) -> list[dict[str, Any]]:
    """Return sums as JSON has them, to the last bit."""
    return [_as_data(each) for each in summaries]


def summaries_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[MetricSummary, ...]:
    """Return what `summaries_as_data` made of them.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    return tuple(map(_from_data, data))


def _without_objects(metrics: MetricSummary | None) -> MetricSummary:
    """Return the sums, without metric objects, of which a small file has none."""
    if metrics is None:
        return MetricSummary()
    for name in metrics.objects:
        logger.warning("the metric object `%s` will cover only what follows in this epoch", name)
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
    """Return a number that keeps its bits, also where it is infinite or none."""
    return value.hex() if isinstance(value, float) else int(value)


def _unpacked(value: Any) -> float:
    return float.fromhex(value) if isinstance(value, str) else value
