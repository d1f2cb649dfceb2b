"""Formats numbers, durations, rows of a training history and events for people."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from raysgd.core.arguments import did_you_mean, is_number

if TYPE_CHECKING:
    from raysgd.core.engine.shared.interface import GroupEvent

_NOT_A_RESULT = frozenset({"epoch", "step", "batch_count", "num_workers"})
_LAST, _SECONDS, _SAMPLES = "last_", "seconds", "num_samples"
_NEVER_SHOWN = ("started", "restarted")


def number(value: Any) -> str:
    """Format a metric. A float gets four significant digits, or no decimals between 10,000 and 10 million.

    Examples:
        >>> [number(value) for value in (0.25, 1 / 3, 12345.678, 7, 0.0000123, float("nan"), True, "a")]
        ['0.2500', '0.3333', '12346', '7', '1.230e-05', 'nan', 'True', 'a']
    """
    if isinstance(value, bool | Integral) or not isinstance(value, Real):
        return str(value)
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if 1e4 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:#.4g}".removesuffix(".") if value else "0"


def seconds(value: float) -> str:
    """Format a duration, given in seconds, with a suitable unit.

    Examples:
        >>> [seconds(value) for value in (0.0004, 0.25, 3.21, 59.99, 75, 4020, 90000)]
        ['0.4 ms', '0.25 s', '3.2 s', '60.0 s', '1 min 15 s', '1 h 07 min', '25 h 00 min']
    """
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def rate(per_second: float) -> str:
    """Format a throughput, given in samples per second.

    Examples:
        >>> [rate(value) for value in (0.5, 12.3, 894.8, 4321, 1234567)]
        ['0.5 samples/s', '12.3 samples/s', '895 samples/s', '4.3k samples/s', '1.2M samples/s']
    """
    divisor, unit = (1e6, "M") if per_second >= 1e6 else (1e3, "k") if per_second >= 1e3 else (1, "")
    value = per_second / divisor
    return f"{value:.{0 if value >= 100 else 1}f}{unit} samples/s"


def counted(how_many: int, thing: str, things: str | None = None) -> str:
    """Return a count followed by its noun in singular or plural.

    Examples:
        >>> counted(1, "epoch"), counted(2, "epoch"), counted(0, "failure", "failures")
        ('1 epoch', '2 epochs', '0 failures')
    """
    return f"{how_many} {thing if how_many == 1 else things or thing + 's'}"


def failures(events: Iterable[Any]) -> list[str]:
    """Return a list with a phrase that counts the worker failures among the events.

    Without failures, the list is empty.
    """
    number = sum(event.is_failure for event in events)
    return [f"{counted(number, 'failure', 'failures')} of workers"] if number else []


def samples_per_s(row: Mapping[str, Any]) -> float | None:
    """Return the throughput of an epoch, from the entries `num_samples` and `seconds` of its history row.

    Return None if either entry is missing or not a finite number, or if `seconds` is 0.
    """
    num_samples, took = row.get(_SAMPLES), row.get(_SECONDS)
    if not is_number(num_samples) or not is_number(took) or not took:
        return None
    return float(num_samples) / float(took)  # type: ignore[arg-type]


def is_metric(name: str, value: Any) -> bool:
    """Return True if an entry of a history row is a metric to show.

    Counts, durations and the entries `last_...` are not shown.
    """
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    is_count = name in _NOT_A_RESULT or name.endswith((_SAMPLES, _SECONDS)) or name == "val_batch_count"
    return is_real and not is_count and not name.startswith(_LAST)


def names_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all entries in history rows, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def metrics_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics in history rows that should be shown, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if is_metric(name, value)))


def most_telling(names: Iterable[str], most: int) -> list[str]:
    """Return up to `most` of the most informative metrics, in their original order.

    Validation metrics count as more informative than training metrics, and losses as more informative than other
    metrics. The learning rate counts as the least informative.

    Examples:
        >>> most_telling(["train_loss", "grad_norm", "lr", "val_loss", "val_accuracy"], 4)
        ['train_loss', 'grad_norm', 'val_loss', 'val_accuracy']
        >>> most_telling(["lr", "train_loss", "train_accuracy"], 2)
        ['train_loss', 'train_accuracy']
    """
    names = [*names]
    by_rank = sorted(names, key=lambda name: (name == "lr", not name.startswith("val_"), "loss" not in name))
    return [name for name in names if name in by_rank[:most]]


def chosen(row: Mapping[str, Any], metrics: Collection[str] | None) -> dict[str, Any]:
    """Return the entries of a history row to show: the metrics with the given names, or all metrics for None."""
    if metrics is None:
        return {name: value for name, value in row.items() if is_metric(name, value)}
    return {name: row[name] for name in metrics if name in row}


def unknown(name: str, known: Iterable[str]) -> str:
    """Return an error message about a metric name that does not exist. It suggests a similar name or lists all names.

    Examples:
        >>> unknown("val_los", ["val_loss", "lr"])
        'there is no metric `val_los`. Did you mean `val_loss`?'
        >>> unknown("x", ["val_loss", "lr"])
        'there is no metric `x`; there are `val_loss`, `lr`.'
    """
    known = [*known]
    guess = did_you_mean(name, known)
    if guess:
        return f"there is no metric `{name}`.{guess}"
    return f"there is no metric `{name}`; there are {', '.join(f'`{each}`' for each in known)}."


def table_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str], most: int) -> tuple[list[str], list[list[str]]]:
    """Return the header and cells of a table of the last `most` epochs.

    Args:
        rows: Rows of a history, one per epoch.
        names: Metrics that get a column. The duration gets a column if it is known.
        most: Largest number of epochs in the table.
    """
    table = []
    for place, row in [*enumerate(rows, start=1)][-most:]:
        values = [number(row[name]) if row.get(name) is not None else "" for name in names]
        took = seconds(row["seconds"]) if is_number(row.get("seconds")) else ""
        table.append([str(row.get("epoch", place)), *values, took])
    if any(cells[-1] for cells in table):
        return ["epoch", *names, "time"], table
    return ["epoch", *names], [cells[:-1] for cells in table]


def event_lines(events: Iterable[GroupEvent], hidden: Collection[str] = _NEVER_SHOWN) -> list[str]:
    """Format failures, resizes and similar events as lines, each with the time of day when the event ended."""
    shown = [event for event in events if event.kind not in hidden]
    return [f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {event}" for event in shown]
