"""Defines `History`: the metrics of a trainer or a run, by call and by epoch."""

from __future__ import annotations

import json
import math
import numbers
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints, overload

from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.history import readable
from raysgd.core.imports import require
from raysgd.core.numbers.results import Metrics, as_number, name_in_test, validation_name
from raysgd.core.text import cards

Entry = TypeVar("Entry")
ResultT = TypeVar("ResultT")
Kind = Literal["train", "validation", "test"]

_MOST_ELEMENTS = 1000
_MOST_METRICS = 4  # largest number of metrics in printed tables
_MOST_ROWS = 20
_ALLOWED: dict[Any, Any] = {float: (int, float)}
MOST_EPOCHS = 10_000
"""A trainer's history keeps at least this many of its newest rows and records. The history of a run keeps all."""


@dataclass(frozen=True)
class CallRecord:
    """The record of one call to `train`, `validate` or `test`.

    Attributes:
        kind: "train", "validation" or "test".
        epoch: Number of epochs started so far.
        metrics: The call's result. Empty if the call had `reduce_results=False`.
        began_at: Start time of the call, in seconds since the Unix epoch.
        seconds: Duration of the call, including recoveries.
        num_workers: Number of workers at the end of the call.
        of_fit: True if `fit` made the call as part of an epoch. False for calls that callbacks make.
        step: For a validation inside an epoch (`validate_every_n_steps`), the `global_step` at which it ran. 0 for all
            other calls.
    """

    kind: Kind
    epoch: int
    metrics: dict[str, Any]
    began_at: float
    seconds: float
    num_workers: int
    of_fit: bool = False
    step: int = 0


class HistoryLimits(NamedTuple):
    """The number of rows, records and events that a history had at some point."""

    rows: int = 0
    records: int = 0
    events: int = 0


BEGINNING = HistoryLimits()


class History(Sequence[dict[str, Any]]):
    """A sequence with one row per epoch: the training metrics, and the validation metrics with the prefix `val_`.

    If an epoch takes several calls to `train`, each call has its own row. A row also has "epoch", "seconds" (of the
    training call) and "num_workers". In an epoch of `fit`, the validation metrics come from the validation by `fit`.
    Validations by callbacks and validations inside an epoch appear only in `records`.

    Args:
        events: The list in which failures and resizes are recorded. Default: a new list.

    Attributes:
        records: All calls to `train`, `validate` and `test`, in order.
        events: Worker failures and group resizes.
        stop_reason: Why the run was stopped early, for example by a callback. None if it was not.
        journal: The run's folder, which contains the journal of its steps; None if the run has no journal.

    Examples:
        >>> history = History()
        >>> history.add(CallRecord("train", 1, {"train_loss": 0.5}, 0.0, 2.0, 4))
        >>> history.add(CallRecord("validation", 1, {"accuracy": 0.9}, 2.0, 1.0, 4))
        >>> history[-1]["val_accuracy"], history["train_loss"]
        (0.9, [0.5])
    """

    def __init__(self, events: list[GroupEvent] | None = None) -> None:
        self._rows: list[dict[str, Any]] = []
        self.records: list[CallRecord] = []
        self.events: list[GroupEvent] = [] if events is None else events
        self._forgotten = BEGINNING
        self.stop_reason: str | None = None
        self.journal: str | None = None

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Any:
        """Return an epoch's row for an index, a list of rows for a slice, or a metric's values for a name.

        The values of a metric include None for epochs without the metric.
        """
        if isinstance(index, str):
            if index not in self.metrics:
                raise KeyError(f"no epoch has the metric {index!r}: there are {self.metrics}")
            return [row.get(index) for row in self._rows]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    @property
    def metrics(self) -> list[str]:
        """Names of all entries in the rows, in order of first appearance."""
        return readable.names_in(self._rows)

    def add(self, record: CallRecord, row: dict[str, Any] | None = None) -> None:
        """Add the record of a call. A `train` call starts a new row.

        The metrics of a `validate` call are added to an existing row, unless the validation ran inside an epoch.

        Args:
            record: The record of the call.
            row: The row that gets the metrics of a `validate` call. Default: the last row, if `fit` made both this call
                and the row's `train` call, or made neither of them. Otherwise, no row gets the metrics.
        """
        self.records.append(record)
        if record.kind == "train":
            facts = {"epoch": record.epoch, "seconds": record.seconds, "num_workers": record.num_workers}
            self._rows.append({**facts, **record.metrics, **facts})
        elif record.kind == "validation" and not record.step:
            validation = {validation_name(name): value for name, value in record.metrics.items()}
            row = self.row_for(record.of_fit) if row is None else row
            row.update(validation, val_seconds=record.seconds)

    def row_for(self, of_fit: bool) -> dict[str, Any]:
        """Return the row that a validation's metrics belong to.

        This is the last row, if `fit` made both the validation and the row's `train` call, or made neither of them.
        Otherwise, return a new dict that is not part of the history.

        Args:
            of_fit: True if `fit` made the validation.
        """
        trained = next((record.of_fit for record in reversed(self.records) if record.kind == "train"), of_fit)
        return self._rows[-1] if self._rows and trained == of_fit else {}

    def add_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add an epoch's metrics, or the metrics that a training function reported, as a new row. Return the row."""
        self._rows.append(dict(row))
        return self._rows[-1]

    def take_over(self, other: History) -> None:
        """Insert the rows, records and events of an earlier run before this history's own.

        The earlier run's `stop_reason` is ignored.
        """
        self._rows[:0] = [dict(row) for row in other]
        self.records[:0] = other.records
        self.events[:0] = other.events

    @property
    def extent(self) -> HistoryLimits:
        """The number of rows, records and events added so far, including those that `forget_old` has deleted."""
        rows, records, events = self._forgotten
        return HistoryLimits(rows + len(self._rows), records + len(self.records), events + len(self.events))

    def part(self, begin: HistoryLimits, end: HistoryLimits) -> History:
        """Return the part of the history that was added between two points in time. The part has no `stop_reason`.

        Args:
            begin: Value of `extent` at the first point.
            end: Value of `extent` at the second point. The entries in between must not have been deleted.
        """
        rows, records, events = self._forgotten
        part = History(self.events[begin.events - events : end.events - events])
        part._rows = self._rows[begin.rows - rows : end.rows - rows]
        part.records = self.records[begin.records - records : end.records - records]
        return part

    def forget_old(self, most: int) -> None:
        """Delete all but the newest `most` rows and records.

        For speed, do nothing until there are 25% more than `most`.
        """
        for name, entries in (("rows", self._rows), ("records", self.records)):
            surplus = len(entries) - most
            if surplus > most // 4:
                del entries[:surplus]
                self._forgotten = self._forgotten._replace(**{name: getattr(self._forgotten, name) + surplus})

    def thinned(self, most: int) -> History:
        """Return a shorter history with at most `most` rows, `most` events and `most` records of each kind.

        The entries are evenly spaced. The first and last entries are always included.
        """
        thin = History(evenly(self.events, most))
        thin._rows = evenly(self._rows, most)
        chosen = {id(each) for kind in get_args(Kind) for each in evenly(self._of_kind(kind), most)}
        thin.records = [record for record in self.records if id(record) in chosen]
        thin.stop_reason = self.stop_reason
        return thin

    def _of_kind(self, kind: Kind) -> list[CallRecord]:
        return [record for record in self.records if record.kind == kind]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        pandas = require("pandas", extra="data", purpose="`History.to_pandas`")
        return pandas.DataFrame(self._rows)

    def as_data(self) -> Any:
        """Return the history as JSON-serializable data: NaN and infinity as None, unsupported values as strings."""
        content = {
            "rows": self._rows,
            "records": [asdict(record) for record in self.records],
            "events": [asdict(event) for event in self.events],
            "stop_reason": self.stop_reason,
        }
        return plain(content)

    def to_json(self) -> str:
        """Return `as_data()` as a JSON string."""
        return json.dumps(self.as_data(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> History:
        """Create a history from a string that `to_json` returned. Metrics that are null become NaN.

        Raises:
            ValueError: `text` is not the JSON of a history.
        """
        try:
            content = json.loads(text)
            history = cls([_made(GroupEvent, entry) for entry in content["events"]])
            history._rows = [_with_nan(row) for row in content["rows"]]
            records = [_made(CallRecord, entry) for entry in content["records"]]
            reason = content["stop_reason"]
            history.stop_reason = None if reason is None else _checked("stop_reason", reason, str)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"This is not the JSON of a `History`: {error!r}") from error
        for record in records:
            record.metrics.update(_with_nan(record.metrics))
        history.records = records
        return history

    def __repr__(self) -> str:
        """Return a one-line summary with the most informative metrics of the last epoch."""
        parts = self._in_words()
        if self.stop_reason is not None:
            parts.append(f"stopped: {self.stop_reason}")
        last = readable.chosen(self[-1], None) if self else {}
        values = ", ".join(f"{name}={last[name]:.4g}" for name in readable.most_telling(last, _MOST_METRICS))
        return f"<History: {', '.join(parts)}{'; last: ' if values else ''}{values}>"

    def __str__(self) -> str:
        """Return a table of the last epochs that fits the terminal, followed by the worker events."""
        lines, metrics = ["no epochs"], readable.metrics_of(self)
        names = metrics
        for most in range(_MOST_METRICS, 0, -1) if self else ():
            names = readable.most_telling(metrics, most)
            head, cells = readable.table_of(self, names, _MOST_ROWS)
            lines = cards.in_columns([head, *cells])
            if len(lines[0]) <= cards.width():
                break
        if len(self) > _MOST_ROWS:
            lines.insert(1, f"({len(self) - _MOST_ROWS} more)")
        if left_out := [name for name in metrics if name not in names]:
            lines.append(cards.fitted(f"also measured: {', '.join(left_out)}"))
        lines += [cards.fitted(line, indent=9) for line in readable.event_lines(self.events)]
        if self.stop_reason is not None:
            lines.append(cards.fitted(f"stopped: {self.stop_reason}"))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names, parts = readable.most_telling(readable.metrics_of(self), _MOST_METRICS), self._in_words()
        parts += [f"the last {_MOST_ROWS} are shown"] if len(self) > _MOST_ROWS else []
        table = cards.grid(*readable.table_of(self, names, _MOST_ROWS))
        reason = cards.note(f"Stopped: {self.stop_reason}") if self.stop_reason is not None else ""
        lines = readable.event_lines(self.events)
        folded = cards.folded(f"what happened to the workers ({len(lines)})", lines)
        return cards.card("History", table, reason, folded, note=", ".join(parts))

    def _in_words(self) -> list[str]:
        return [readable.counted(len(self), "epoch"), *readable.failures(self.events)]


def plain(value: Any) -> Any:
    """Convert a value to JSON-serializable data: NaN and infinity as None, unsupported values as strings."""
    if value is None or isinstance(value, str):
        return value
    number = as_number(value)
    if isinstance(number, int):
        return number
    if isinstance(number, numbers.Real):
        return float(number) if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if number is None and hasattr(value, "tolist") and math.prod(getattr(value, "shape", ())) <= _MOST_ELEMENTS:
        return plain(value.tolist())
    return str(value)


def evenly(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Return at most `most` evenly spaced entries, including the first and the last. `most` must be at least 2.

    Examples:
        >>> evenly(range(10), 4), evenly("abc", 4)
        ([0, 3, 6, 9], ['a', 'b', 'c'])
    """
    if len(entries) <= most:
        return list(entries)
    return [entries[number * (len(entries) - 1) // (most - 1)] for number in range(most)]


def _made(kind: Any, entry: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    return kind(**{name: _checked(name, value, hints[name]) for name, value in entry.items() if name in known})


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return a value from JSON if it matches the type hint. Otherwise raise an error.

    Args:
        name: Name of the field, for the error.
        value: The value.
        hint: A type, or a `Literal` of strings.

    Raises:
        TypeError: The value does not match.
    """
    words, base = get_args(hint), get_origin(hint)
    if base is Literal:
        is_right = isinstance(value, str) and value in words
    else:
        is_right = isinstance(value, _ALLOWED.get(hint, base or hint)) and isinstance(value, bool) == (hint is bool)
    if not is_right:
        raise TypeError(f"{name}={value!r}")
    return value


def _with_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in row.items()}


RecordBeside = Callable[[Any, float, float], CallRecord]
"""Adds a finished call to the history and returns its record.

Takes the call's result, its start time in seconds since the Unix epoch, and its duration in seconds.
"""


class CallRecorder:
    """Adds a trainer's calls to its history.

    Args:
        events: The list of worker events, to which other objects append.

    Attributes:
        history: The history with the calls so far.
        trained: The epoch, from 1, in which the last call to `train` started.
        told_s: Returns the seconds that the ranks have spent in training calls since an earlier process of this trainer
            stored its state. If the ranks differ, returns the largest value. None if there was no earlier process, or
            once this process has recorded a training call.
    """

    def __init__(self, events: list[GroupEvent]) -> None:
        self.history, self.trained = History(events), 0
        self.told_s: Callable[[], float] | None = None
        self._lock = threading.Lock()

    def begin(
        self, kind: Kind, of_fit: bool = False, inside: tuple[int, int] | None = None
    ) -> Callable[[ResultT, int], ResultT]:
        """Return a function that adds a call, which begins now, to the history once it has ended.

        The function takes the call's result and the number of workers at the end of the call. It returns the result.

        Args:
            kind: "train", "validation" or "test".
            of_fit: True if `fit` makes the call as part of an epoch.
            inside: The epoch and step of a validation inside an epoch. None for other calls.
        """
        began_at, began = time.time(), time.perf_counter()

        def end(result: ResultT, num_workers: int) -> ResultT:
            first_s, seconds = began_at, time.perf_counter() - began
            # An earlier process of the trainer may have started this call. Add the time that it spent on the call.
            if kind == "train" and self.told_s is not None:
                missed_s, self.told_s = max(0.0, self.told_s() - seconds), None
                first_s, seconds = first_s - missed_s, seconds + missed_s
            metrics = dict(result) if isinstance(result, Mapping) else {}
            epoch, step = (self._epoch, 0) if inside is None else inside
            if kind == "train":
                epoch = metrics["epoch"] if isinstance(metrics.get("epoch"), int) else self.trained
            self.add_record(CallRecord(kind, epoch, metrics, first_s, seconds, num_workers, of_fit, step))
            return result

        return end

    def begin_beside(self, of_fit: bool) -> RecordBeside:
        """Return a function that adds a validation on a spare worker to the history.

        Call the function when the validation has finished. It adds the metrics to the row that was current when
        `begin_beside` was called, even if later calls finish before the validation.

        Args:
            of_fit: True if `fit` started the validation.
        """
        epoch, row = self._epoch, self.history.row_for(of_fit)

        def add(result: Any, began_at: float, seconds: float) -> CallRecord:
            metrics = dict(result) if isinstance(result, Mapping) else {}
            record = CallRecord("validation", epoch, metrics, began_at, seconds, 1, of_fit)
            self.add_record(record, row)
            return record

        return add

    def add_record(self, record: CallRecord, row: dict[str, Any] | None = None) -> None:
        """Add the record of a call, which another process may have made. For `row`, see `History.add`."""
        with self._lock:
            self.history.add(record, row)
            self.history.forget_old(MOST_EPOCHS)

    @property
    def _epoch(self) -> int:
        records = self.history.records
        return records[-1].epoch if records else 0


def as_test(metrics: Mapping[str, Any]) -> Metrics:
    """Return the result of a `validate` call with the names that `test` uses for metrics."""
    return Metrics({name_in_test(name): value for name, value in metrics.items()})
