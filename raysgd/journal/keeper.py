"""Writes the journal of a run in the driver: fetches what the workers record about each step, and merges it."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from raysgd._version import __version__
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.transfers import receive_reports
from raysgd.core.numbers.results import CallProgress
from raysgd.core.text.secrets import masked
from raysgd.journal.journal import JournalWriter, StepRecord
from raysgd.journal.recorder import Attempt, LegReport, Report, StepRecorder, StepReport, reports_after

logger = logging.getLogger(__name__)

_FETCH_EVERY_S = 1.0
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


@dataclass
class _OpenStep:
    """The reports about one step that have arrived from workers so far, by the name of each worker's recorder."""

    attempt: Attempt
    parts: dict[str, StepReport] = field(default_factory=dict)

    def record(self, step: int) -> StepRecord:
        parts = self.parts.values()
        weight = math.fsum(each.weight for each in parts)
        norm = next((each.norm for each in parts if each.norm is not None), None)
        if not weight:
            return StepRecord(step, math.nan, norm, -1.0)
        return StepRecord(step, _sum(each.total for each in parts if each.weight) / weight, norm, weight)


def _sum(numbers: Iterable[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order of the numbers."""
    values = list(numbers)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


class StepBook:
    """Merges the reports of all workers about each step into one record of the step.

    After a failure, workers run a training call again in a new attempt, which repeats some steps. The reports of the
    new attempt then replace those of earlier attempts about the same steps.
    """

    def __init__(self) -> None:
        self._newest: Attempt = (0, 0)
        # For each attempt: the step after which the attempt starts, and its number of workers.
        self._began: dict[Attempt, tuple[int, int]] = {}
        self._open: dict[int, _OpenStep] = {}
        self.last_step = 0

    def add(self, name: str, report: Report) -> Mapping[str, Any] | StepRecord | None:
        """Add a report of a worker.

        Args:
            name: Name of the recorder, the object in the worker that has made the report.
            report: A report about a step, or about the start of a leg (a part of an epoch that one group of workers
                runs).

        Returns:
            The line for the journal if a new leg starts, or the record of the step from all reports so far. None if the
            report is outdated or was added before.
        """
        if isinstance(report, LegReport):
            return self._begin(report)
        step, attempt = report.step, report.attempt
        if self._is_replaced(step, attempt) or attempt not in self._began:
            return None
        found = self._open.setdefault(step, _OpenStep(attempt))
        found.parts[name] = report
        if len(found.parts) >= self._began[attempt][1]:
            del self._open[step]
        self.last_step = max(self.last_step, step)
        return found.record(step)

    def _begin(self, report: LegReport) -> Mapping[str, Any] | None:
        if report.attempt <= self._newest:
            return None
        after = int(report.entry["step"])
        before, self._newest = self._newest, report.attempt
        self._began[report.attempt] = after, int(report.entry["num_workers"])
        self._began = {attempt: begin for attempt, begin in self._began.items() if begin[0] <= after}
        # Workers that survived a failure may still send reports of the previous attempt, but none of older attempts.
        self._open = {step: each for step, each in self._open.items() if step <= after and each.attempt >= before}
        self.last_step = after
        return report.entry

    def _is_replaced(self, step: int, attempt: Attempt) -> bool:
        return any(later > attempt and step > after for later, (after, _) in self._began.items())


class JournalKeeper:
    """Writes the journal of one run while the run trains.

    If a file cannot be written, the journal ends there with a warning, and the run continues.

    Args:
        folder: Function that returns the folder of the run.
        controller: Controller of the workers.
        header: Function that returns the line of the journal that describes this program, as `header_of` does.

    Attributes:
        recorder: The worker callback that records the steps in each worker.
    """

    def __init__(
        self, folder: Callable[[], Path], controller: ElasticController, header: Callable[[], dict[str, Any]]
    ) -> None:
        self.recorder = StepRecorder()
        self._folder, self._controller, self._header = folder, controller, header
        self._writer: JournalWriter | None = None
        self._book, self._received = StepBook(), dict[str, int]()
        self._fetched_at, self._is_off = 0.0, False

    @property
    def folder(self) -> str:
        """The folder of the run."""
        return str(self._folder())

    def __call__(self, progress: CallProgress) -> None:
        """Fetch new reports about steps from the workers, once a second and at the end of a training call.

        This object is registered as a listener, which receives the progress of calls several times a second.
        """
        if progress.kind == "train" and (progress.is_done or time.monotonic() > self._fetched_at + _FETCH_EVERY_S):
            self.fetch(are_last=progress.is_done)

    def fetch(self, *, are_last: bool = True) -> None:
        """Fetch all reports that the driver does not have yet, and write them to the journal.

        Args:
            are_last: True if the workers have ended or left the training call.
        """
        if self._is_off:
            return
        group, received = self._controller.ensure_group(), dict(self._received)
        asked = [group.fetch(rank, reports_after, received) for rank in range(len(group))]
        found, failure = receive_reports(asked, are_last=are_last)
        if failure is not None:  # only log the error, because a later request brings these reports, too
            logger.debug("no news of the steps: %s", failure)
        self._fetched_at = time.monotonic()
        try:
            self._write(found)
        except OSError as error:
            self._is_off = True
            logger.warning("the journal of the run ends here: %s: %s", type(error).__name__, error)

    def _write(self, found: list[tuple[str, list[tuple[int, Report]]]]) -> None:
        """Write reports to the journal.

        Args:
            found: For each worker, the name of its recorder and its numbered reports. The reports are sorted, so that
                the start of an attempt is written before its steps.
        """
        records = dict[int, StepRecord]()
        reports = [(name, report) for name, each in found for _, report in each]
        for name, report in sorted(reports, key=lambda each: (each[1].attempt, isinstance(each[1], StepReport))):
            new = self._book.add(name, report)
            if isinstance(new, StepRecord):
                records[new.step] = new
            elif new is not None:
                self._flush(records)
                self._open_writer().begin_leg(new)
        self._flush(records)
        self._received.update({name: each[-1][0] for name, each in found if each})

    def _flush(self, records: dict[int, StepRecord]) -> None:
        if records:
            self._open_writer().write_steps([records[step] for step in sorted(records)])
            records.clear()

    def _open_writer(self) -> JournalWriter:
        if self._writer is None:
            self._writer = JournalWriter(self._folder(), self._header())
        return self._writer

    @property
    def last_step(self) -> int:
        """Number of the last step about which the driver has a report."""
        return self._book.last_step

    def note_checkpoint(self, location: str, step: int | None) -> None:
        """Write to the journal that a checkpoint was saved.

        Args:
            location: Path or URI of the checkpoint.
            step: Number of the step after which the state was saved. None for the last step about which the driver has
                a report.
        """
        if self._writer is None or self._is_off:
            return
        at = self._relative(location)
        try:
            self._writer.note_checkpoint(at, self._book.last_step if step is None else step)
        except OSError as error:
            logger.warning("the journal does not say that %s was saved: %s", at, error)

    def _relative(self, location: str) -> str:
        """Make a path in the folder of the run relative to this folder, so that the user can move the folder."""
        try:
            return str(Path(location).expanduser().absolute().relative_to(self._folder()))
        except ValueError:
            return masked(location)


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
        each.name: dataclasses.asdict(cast("Any", value)) if dataclasses.is_dataclass(value) else value
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
        "options": {name: value for name, value in options.items() if _is_plain(value) and masked(value) == value},
    }


def _is_plain(value: Any) -> bool:
    """Return True if a value can be written as JSON and read again without a change."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in _PLAIN
