"""The checkpoints of a run that are in its folder, with the reports they came with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from raysgd._arguments.checks import is_integer
from raysgd._numbers.ranking import Ranking, as_score
from raysgd._text.once import Once
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import CheckpointConfig
from raysgd.air.layout import TrialFolder, checkpoint_index
from raysgd.air.metrics import RunProgress
from raysgd.air.reports import ReportedCheckpoint, ReportedCheckpointStatus
from raysgd.air.result import by_checkpoint, value_at
from raysgd.train.constants import TUNE_CHECKPOINT_ID
from raysgd.train.fit.record.chores import BackgroundTasks

logger = logging.getLogger(__name__)


class KeptCheckpoints:
    """Keeps the best checkpoints and the newest one, and deletes the others.

    Args:
        folder: The folders of the run.
        config: What is kept.
        chores: Deletes them.

    Attributes:
        latest: The newest checkpoint; None before the first one.
        progress: How far the run was when it was reported.
    """

    def __init__(self, folder: TrialFolder, config: CheckpointConfig, chores: BackgroundTasks) -> None:
        self._folder = folder
        self._attribute = config.checkpoint_score_attribute
        self._ranking = Ranking(config.num_to_keep, config.checkpoint_score_order, spares_newest=True)
        self._keeps_none = config.num_to_keep == 0
        self._chores = chores
        self._present: dict[int, ReportedCheckpoint] = {}
        self._next = 0
        self._once = Once()
        self.latest: Checkpoint | None = None
        self.progress = RunProgress()

    def take_over(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what a run that this one continues has left, with its reports."""
        by_name = by_checkpoint(reports)
        for name in self._folder.checkpoint_names():
            report = by_name.get(name)
            self.add(Checkpoint(self._folder.trial / name), report or {}, _progress_at(report, reports))

    def add(
        self, checkpoint: Checkpoint, metrics: Mapping[str, Any], progress: RunProgress, is_pending: bool = False
    ) -> None:
        """Takes a new checkpoint in, and deletes those that it replaces: once it is settled, if it is pending."""
        name = name_of(checkpoint)
        index = (checkpoint_index(name) if name is not None else None) or self._next
        self._next = index + 1
        self.latest, self.progress = checkpoint, progress
        self._present[index] = reported = ReportedCheckpoint(checkpoint, dict(metrics))
        if is_pending:
            reported.status = ReportedCheckpointStatus.PENDING_VALIDATION
        else:
            self._rank(index)

    def settle(self, checkpoint: Checkpoint, metrics: Mapping[str, Any], status: ReportedCheckpointStatus) -> None:
        """Adds what the validation of a checkpoint has found, and deletes what it replaces."""
        index = next(index for index, kept in self._present.items() if kept.checkpoint is checkpoint)
        self._present[index].metrics.update(metrics)
        self._present[index].status = status
        self._rank(index)

    def _rank(self, index: int) -> None:
        for dropped in self._ranking.admit(index, self._score(self._present[index].metrics)):
            self._delete(dropped)

    @property
    def best(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Those that are kept, with the metrics of their reports: the worst first, the best last."""
        kept = [self._present[index] for index in self._ranking.kept]
        return [(each.checkpoint, each.metrics) for each in kept]

    @property
    def by_age(self) -> list[ReportedCheckpoint]:
        """The same, the oldest first, as they go to other processes."""
        present = [self._present[index] for index in sorted(self._present)]
        return [replace(each, checkpoint=each.checkpoint.by_place(), metrics=dict(each.metrics)) for each in present]

    def end(self) -> None:
        """The run has ended well. Where none is to stay on disk, the latest one moves into memory."""
        if self._keeps_none and self.latest is not None and name_of(self.latest) is not None:
            self.latest = Checkpoint.from_dict(self.latest.to_dict())
            for index in list(self._present):
                self._delete(index)

    def _delete(self, index: int) -> None:
        name = name_of(self._present.pop(index).checkpoint)
        if name is not None:
            self._chores.submit(f"delete {name}", (self._folder.trial / name).delete)

    def _score(self, metrics: Mapping[str, Any]) -> float | None:
        if self._attribute is None:
            return None
        value = value_at(metrics, self._attribute)
        score = as_score(value)
        if score is None and self._once.is_first(self._attribute):
            what = "is missing" if value is None else f"is {value!r:.80}, not a number"
            logger.error(
                "`checkpoint_score_attribute=%r` %s in a report with a checkpoint, which counts as the worst. The "
                "report has: %s",
                self._attribute,
                what,
                ", ".join(map(str, metrics)),
            )
        return score


def name_of(checkpoint: Checkpoint) -> str | None:
    """The name of a checkpoint's folder; None for one in memory."""
    return PurePosixPath(checkpoint.path).name if checkpoint.uri is not None else None


def number_of(checkpoint: Checkpoint) -> int:
    """The number that a checkpoint has in its run, by the name of its folder or its content; 0 for any other one."""
    name = name_of(checkpoint)
    number: Any = checkpoint.to_dict().get(TUNE_CHECKPOINT_ID) if name is None else checkpoint_index(name)
    return number if is_integer(number) and number >= 0 else 0


def _progress_at(report: Mapping[str, Any] | None, reports: Sequence[Mapping[str, Any]]) -> RunProgress:
    """Return the progress of a run at a checkpoint whose report the driver could not write any more."""
    if report is not None:
        return RunProgress.of(report)
    return RunProgress.of(reports[-1]).after(0.0) if reports else RunProgress(iteration=1)
