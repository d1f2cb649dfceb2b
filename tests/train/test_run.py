from __future__ import annotations

import pytest

from raysgd.exceptions import StepMismatchError
from raysgd.train._mailbox import Ended
from raysgd.train._messages import CheckpointRef, Message, TrainingResultType
from raysgd.train._run import check_step

REPORT, CHECKPOINT = TrainingResultType.REPORT, TrainingResultType.CHECKPOINT


def test_reports_of_all_make_a_step() -> None:
    step = check_step([Message(REPORT, 1), Message(REPORT, 2)])
    assert (step.kind, step.data, step.checkpoint_ref) == (REPORT, (1, 2), None)


def test_a_checkpoint_is_that_of_rank_0() -> None:
    step = check_step([Message(CHECKPOINT, checkpoint_ref=CheckpointRef(1.0)), Message(CHECKPOINT)])
    assert (step.kind, step.checkpoint_ref, step.source) == (CHECKPOINT, CheckpointRef(1.0), 0)


def test_a_report_may_bring_a_checkpoint_from_any_rank() -> None:
    step = check_step([Message(REPORT, 1), Message(REPORT, 2, CheckpointRef(2.0))])
    assert (step.kind, step.checkpoint_ref, step.source) == (REPORT, CheckpointRef(2.0), 1)


def test_of_several_reported_checkpoints_that_of_the_lowest_rank_is_taken_and_the_others_are_refused() -> None:
    step = check_step(
        [
            Message(REPORT, 1),
            Message(REPORT, 2, CheckpointRef(2.0, token=7)),
            Message(REPORT, 3, CheckpointRef(3.0, token=4)),
        ]
    )
    assert (step.checkpoint_ref, step.source, step.refused) == (CheckpointRef(2.0, token=7), 1, ((2, 4),))


def test_the_end_of_all_is_the_end() -> None:
    step = check_step([Ended("a"), Ended(None)])
    assert (step.kind, step.data) == (None, ("a", None))


def test_the_end_of_some_is_an_error_that_names_them() -> None:
    with pytest.raises(StepMismatchError, match="different number of calls: they ended on rank 1,"):
        check_step([Message(REPORT, 1), Ended()])


def test_different_calls_are_an_error_that_names_the_ranks() -> None:
    with pytest.raises(StepMismatchError, match=r"ranks 0, 2 called `save_checkpoint`.*same calls in the same order"):
        check_step([Message(CHECKPOINT), Message(REPORT, 1), Message(CHECKPOINT)])
