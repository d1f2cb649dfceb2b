"""Writes the journal of a run in the driver: merges what the workers have recorded about each step."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from raysgd._version import __version__
from raysgd.callbacks.callback import Run
from raysgd.core.text.secrets import masked
from raysgd.journal.entries import CHECKPOINT, GAP, LEFT_OUT, LEG
from raysgd.journal.journal import Journal, JournalWriter
from raysgd.journal.recorder import Attempt, Column, LineReport, News, StepBlock, StepRecorder, exact_sum
from raysgd.journal.steps import NO_LOSS, NO_NORM, STEPS, Steps

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, str, type(None))
_NOT_OPTIONS = {
    "training_operator_cls",
    "config",
    "recovery",
    "revision",
    "config_changes",
    "callbacks_revision",
    "worker_callbacks",
}


class StepBook:
    """Merges the reports of all workers about each step into one record of the step.

    After a failure, workers run a training call again in a new attempt, which repeats some steps. The reports of the
    new attempt then replace the reports of earlier attempts about the same steps.
    """

    def __init__(self) -> None:
        self._newest: Attempt = (0, 0)
        # For each attempt: the step after which the attempt starts, and its number of workers.
        self._began: dict[Attempt, tuple[int, int]] = {}
        # For each attempt, by the name of each worker's recorder: the reports about steps that some workers have not
        # reported yet.
        self._open: dict[Attempt, dict[str, Column]] = {}
        self._changed: set[Attempt] = set()
        self._left_out: set[tuple[Attempt, int, int]] = set()  # attempt, step and optimizer of each report
        self.last_step = 0

    def begin(self, report: LineReport) -> Mapping[str, Any] | None:
        """Record the start of a leg, and return its line for the journal.

        Do nothing and return None if the leg is outdated or was reported before.

        Args:
            report: A worker's report that a leg starts. A leg is a part of an epoch that one group of workers runs.
        """
        if report.attempt <= self._newest:
            return None
        after = int(report.entry["step"])
        before, self._newest = self._newest, report.attempt
        self._began[report.attempt] = after, int(report.entry["num_workers"])
        self._began = {attempt: begin for attempt, begin in self._began.items() if begin[0] <= after}
        # Workers that survived a failure may still send reports of the previous attempt, but none of older attempts.
        self._open = {
            attempt: {name: each[each["step"] <= after] for name, each in parts.items()}
            for attempt, parts in self._open.items()
            if attempt >= before
        }
        self.last_step = after
        return report.entry

    def add(self, name: str, block: StepBlock) -> None:
        """Add a worker's report about some steps. Steps that a later attempt repeats are left out.

        Args:
            name: Name of the recorder, the object in the worker that made the report.
            block: The report.
        """
        parts = block.parts[block.parts["step"] <= self._last_of(block.attempt)]
        if not len(parts):
            return
        known = self._open.setdefault(block.attempt, {})
        known[name] = np.concatenate([known.get(name, parts[:0]), parts])
        self._changed.add(block.attempt)
        self.last_step = max(self.last_step, int(parts["step"][-1]))

    def _last_of(self, attempt: Attempt) -> float:
        """Return the last step of an attempt that no later attempt repeats. Return 0 if the attempt is unknown."""
        if attempt not in self._began:
            return 0
        return min((after for later, (after, _) in self._began.items() if later > attempt), default=math.inf)

    def leave_out(self, report: LineReport) -> Mapping[str, Any] | None:
        """Return the line for the journal about a step that was left out. Return None if it is outdated or known."""
        key = report.attempt, int(report.entry["step"]), int(report.entry["optimizer"])
        if key in self._left_out or key[1] > self._last_of(report.attempt):
            return None
        self._left_out.add(key)
        return report.entry

    def take(self) -> Iterator[tuple[Column, Steps]]:
        """Yield the numbers and the records of the steps for which reports were added since the last call.

        A record may lack the reports of some workers. Once these reports arrive, the record is yielded again.
        """
        for attempt in sorted(self._changed):
            parts = self._open[attempt]
            numbers, records, counts = _merged([*parts.values()])
            still_open = numbers[counts < self._began[attempt][1]]
            rest = {name: each[np.isin(each["step"], still_open)] for name, each in parts.items()}
            self._open[attempt] = {name: each for name, each in rest.items() if len(each)}
            yield numbers, records
        self._changed.clear()


def _merged(parts: Sequence[Column]) -> tuple[Column, Steps, Column]:
    """Merge the reports of several workers.

    Returns:
        The numbers of the steps, their records, and the number of workers that reported each step.
    """
    numbers = np.unique(np.concatenate([each["step"] for each in parts]))
    totals, weights = np.zeros((2, len(parts), len(numbers)))
    norms, counts = np.full(len(numbers), NO_NORM), np.zeros(len(numbers), dtype=int)
    for row, each in enumerate(parts):
        at = np.searchsorted(numbers, each["step"])
        totals[row, at], weights[row, at] = each["total"], each["weight"]
        norms[at] = np.where(norms[at] == NO_NORM, each["norm"], norms[at])
        counts[at] += 1
    weight, records = _sums(weights), np.empty(len(numbers), STEPS)
    records["loss"] = np.divide(_sums(totals), weight, out=np.full(len(numbers), math.nan), where=weight > 0)
    with np.errstate(over="ignore"):  # a norm that is too large for four bytes is infinite
        records["norm"], records["weight"] = norms, np.where(weight > 0, weight, NO_LOSS)
    return numbers, records, counts


def _sums(rows: Column) -> Column:
    """Return the correctly rounded sum of each column, which does not depend on the order of the rows."""
    if len(rows) > 2:
        return np.array([exact_sum(column) for column in rows.T.tolist()])
    with np.errstate(over="ignore", invalid="ignore"):
        found: Column = rows.sum(axis=0)  # the sum of two numbers is correctly rounded
    return found


class JournalKeeper:
    """Writes the journal of one run while the run trains.

    If a file cannot be written, the journal ends there with a warning, and the run continues.

    Args:
        run: The run.
        life: The trainer's workers and settings, a `TrainerLife`.
        entries: Entries for the line of the journal that describes this program, in addition to those of `header_of`.
        is_taken_over: True if another process has started this run.

    Attributes:
        source: The class of the worker callbacks that record the steps.
        received: For each of these callbacks in the workers, the number of the last report that the driver has.
    """

    source = StepRecorder

    def __init__(self, run: Run, life: Any, entries: Mapping[str, Any], is_taken_over: bool = False) -> None:
        self._run, self._life, self._entries, self._is_taken_over = run, life, entries, is_taken_over
        self._folder_before = life.recorder.history.journal
        self._writer: JournalWriter | None = None
        self._book, self.received = StepBook(), dict[str, int]()
        self._is_off, self._gap_end = False, 0

    def receive(self, found: Sequence[News], failure: Exception | None, is_done: bool) -> None:
        """Write the reports that the workers have sent to the journal.

        Args:
            found: What each worker has reported.
            failure: The reason why a report is missing, or None. If its worker is alive, the next request brings it.
            is_done: True if the workers have ended or left the training call.
        """
        try:
            if not self._is_off:
                self._write(found)
        except OSError as error:
            self._is_off = True
            logger.warning("the journal of the run ends here: %s: %s", type(error).__name__, error)
        self.received.update({each.name: each.last for each in found})

    def _write(self, found: Sequence[News]) -> None:
        """Write reports to the journal. First sort them, to write the start of an attempt before the attempt's steps.

        Args:
            found: What each worker has reported.
        """
        reports = [(each.name, report) for each in found for report in each.reports]
        for name, report in sorted(reports, key=lambda each: (each[1].attempt, getattr(each[1], "kind", "") != LEG)):
            if isinstance(report, StepBlock):
                self._book.add(name, report)
            elif report.kind == LEFT_OUT:
                if (line := self._book.leave_out(report)) is not None:
                    self._note(LEFT_OUT, **line)
            else:
                self._write_steps()
                if (line := self._book.begin(report)) is not None:
                    self._begin_leg(line)
        self._write_steps()
        lost = [each.lost for each in found if each.lost is not None]
        first, last = min((first for first, _ in lost), default=0), max((last for _, last in lost), default=0)
        if last > self._gap_end:
            if not self._gap_end:
                logger.warning(
                    "the journal of the run lacks steps from %d to %d, and maybe later steps, because too many reports "
                    "of the workers waited for the driver",
                    first,
                    last,
                )
            self._gap_end = last
            self._note(GAP, first_step=first, last_step=last)

    def _begin_leg(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            header = {**header_of(self._life.settings), "epochs": self._run.epochs, **self._entries}
            self._writer = JournalWriter(self._run.folder, header, line["step"] > 0 and self._is_continued())
        self._writer.begin_leg(line)

    def _write_steps(self) -> None:
        for numbers, records in self._book.take():
            assert self._writer is not None, "the book has only steps of legs that have begun"
            self._writer.write_steps(numbers, records)

    def _note(self, kind: str, **entries: Any) -> None:
        if self._writer is not None:
            self._writer.note(kind, **entries)

    def _is_continued(self) -> bool:
        """Return True if the run continues the run of the journal in its folder.

        This is so if this trainer has written the journal, or if the last file that the trainer saved or loaded is in
        the folder of the run, or beside a checkpoint that the journal lists.
        """
        folder = self._run.folder
        if self._is_taken_over or self._folder_before == str(folder):
            return True
        try:
            journal = Journal(folder)
        except (FileNotFoundError, ValueError):  # there is none, or a damaged one, which the user may want to look at
            return True
        last_file = self._life.controller.snapshots.last_file
        at = None if last_file is None else self._relative(last_file)
        if at is not None:
            is_inside = "://" not in at and not Path(at).is_absolute()
            if is_inside or _folder_of(at) in map(_folder_of, journal.checkpoints.values()):
                return True
        reason = "the trainer has trained elsewhere before"
        if last_file is not None:
            reason = f"{last_file} is neither in that folder nor beside a checkpoint that the journal lists"
        logger.warning("the journal in %s is of another run, so this run replaces it: %s", folder, reason)
        return False

    @property
    def last_step(self) -> int:
        """Number of the last step for which the driver has a report."""
        return self._book.last_step

    def note_checkpoint(self, location: str, step: int | None) -> None:
        """Write to the journal that a checkpoint was saved.

        Args:
            location: Path or URI of the checkpoint.
            step: Number of the step after which the state was saved. None for the last step for which the driver has a
                report.
        """
        if self._is_off:
            return
        at = self._relative(location)
        try:
            self._note(CHECKPOINT, step=self.last_step if step is None else step, location=at)
        except OSError as error:
            logger.warning("the journal does not say that %s was saved: %s", at, error)

    def _relative(self, location: str) -> str:
        """Return a location to write to the journal. It stays valid if the user moves the folder of the run.

        A path inside the folder of the run is returned relative to this folder. Any other path is returned as an
        absolute path, and a URI without secrets.
        """
        if "://" in location:
            return masked(location)
        path, folder = Path(location).expanduser(), self._run.folder.resolve()
        path = path.parent.resolve() / path.name
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else masked(str(path))


def _folder_of(location: str) -> str:
    return location.rpartition("/")[0]


def header_of(settings: Any) -> dict[str, Any]:
    """Return the line of the journal that describes the program: its operator class, config and options.

    The line is plain data without secrets.

    Args:
        settings: The settings of the trainer.
    """
    operator_cls, given = settings.training_operator_cls, dict(settings.config)
    shown = masked(given)
    kept = {str(name) for name, value in given.items() if _is_plain(value) and shown.get(name) == value}
    options = {
        each.name: _plain_entries(dataclasses.asdict(cast("Any", value))) if dataclasses.is_dataclass(value) else value
        for each in dataclasses.fields(settings)
        if each.name not in _NOT_OPTIONS
        for value in [getattr(settings, each.name)]
    }
    return {
        "raysgd": __version__,
        "began_at": time.time(),
        "operator": f"{operator_cls.__module__}:{operator_cls.__qualname__}",
        "config": {name: value for name, value in given.items() if name in kept},
        "config_left_out": sorted(masked(str(name)) for name in given if str(name) not in kept),
        "options": _plain_entries(options),
    }


def _plain_entries(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if _is_plain(value) and masked(value) == value}


def _is_plain(value: Any) -> bool:
    """Return True if a value can be written as JSON and read again unchanged, except that tuples become lists."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in _PLAIN
