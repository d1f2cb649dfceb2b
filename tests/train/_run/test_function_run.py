from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raysgd.engine.policies import RetryBudget
from raysgd.exceptions import StepMismatchError
from raysgd.train._rules.max_retries import LossCounter
from raysgd.train._run.function_run import FunctionRun, check_step
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import CheckpointRef, FunctionMessage, TrainingResultType

REPORT, CHECKPOINT = TrainingResultType.REPORT, TrainingResultType.CHECKPOINT


def test_reports_of_all_make_a_step() -> None:
    step = check_step([FunctionMessage(REPORT, 1), FunctionMessage(REPORT, 2)])
    assert (step.kind, step.data, step.checkpoint_ref) == (REPORT, (1, 2), None)


def test_a_checkpoint_is_that_of_rank_0() -> None:
    step = check_step([FunctionMessage(CHECKPOINT, checkpoint_ref=CheckpointRef(1.0)), FunctionMessage(CHECKPOINT)])
    assert (step.kind, step.checkpoint_ref, step.source) == (CHECKPOINT, CheckpointRef(1.0), 0)


def test_a_report_may_bring_a_checkpoint_from_any_rank() -> None:
    step = check_step([FunctionMessage(REPORT, 1), FunctionMessage(REPORT, 2, CheckpointRef(2.0))])
    assert (step.kind, step.checkpoint_ref, step.source) == (REPORT, CheckpointRef(2.0), 1)


def test_of_several_reported_checkpoints_that_of_the_lowest_rank_is_taken_and_the_others_are_refused() -> None:
    step = check_step(
        [
            FunctionMessage(REPORT, 1),
            FunctionMessage(REPORT, 2, CheckpointRef(2.0, token=7)),
            FunctionMessage(REPORT, 3, CheckpointRef(3.0, token=4)),
        ]
    )
    assert (step.checkpoint_ref, step.source, step.refused) == (CheckpointRef(2.0, token=7), 1, ((2, 4),))


def test_of_a_checkpoint_that_travels_and_stored_ones_the_first_is_taken_and_none_is_refused() -> None:
    stored = {0: CheckpointRef(files=("a",)), 1: CheckpointRef(token=3, files=("b",))}
    sent = CheckpointRef(2.0, token=4)
    step = check_step(
        [FunctionMessage(REPORT, 1, stored[0]), FunctionMessage(REPORT, 2, stored[1]), FunctionMessage(REPORT, 3, sent)]
    )
    assert (step.checkpoint_ref, step.source, step.refused, step.stored) == (sent, 2, (), stored)


def test_the_end_of_all_is_the_end() -> None:
    step = check_step([FunctionEnded("a"), FunctionEnded(None)])
    assert (step.kind, step.data) == (None, ("a", None))


def test_a_rank_that_does_not_report_yet_is_left_out() -> None:
    step = check_step([None, FunctionMessage(REPORT, 2, CheckpointRef(2.0)), FunctionMessage(REPORT, 3)])
    assert (step.data, step.source) == ((2, 3), 1)
    assert check_step([None, FunctionEnded("b")]).data == ("b",)


def test_the_end_of_some_is_an_error_that_names_them() -> None:
    with pytest.raises(StepMismatchError, match="different number of calls: they ended on rank 1,"):
        check_step([FunctionMessage(REPORT, 1), FunctionEnded()])


def test_different_calls_are_an_error_that_names_the_ranks() -> None:
    with pytest.raises(StepMismatchError, match=r"ranks 0, 2 called `save_checkpoint`.*same calls in the same order"):
        check_step([FunctionMessage(CHECKPOINT), FunctionMessage(REPORT, 1), FunctionMessage(CHECKPOINT)])


# ------------------------------------------------------------------------------------------- functions that run ahead

Answer = list[FunctionMessage | FunctionEnded]


class Group:
    """Stands for the workers and for what starts functions on them: ranks that answer what was written down for them.

    Args:
        attempts: For each group of workers, the answers of each rank; the last one it has is followed by its death.
    """

    num_workers = 2

    def __init__(self, *attempts: Sequence[list[Answer]]) -> None:
        self.attempts = [[list(answers) for answers in ranks] for ranks in attempts]
        self.worlds: Any = None
        self.attempt: int | None = None
        self.members: dict[int, int] = {}
        self.is_elastic = self.can_be_joined = False
        self.told: list[list[tuple[Any, ...]]] = []

    def __call__(self, worlds: Any) -> list[tuple[Any, ...]]:
        if worlds is not self.worlds:
            self.worlds, self.attempt, self.members = (
                worlds,
                (self.attempt or 0) + 1,
                dict.fromkeys(range(len(worlds)), 0),
            )
        return [()] * len(worlds)

    def run(self, call: Any, budget: RetryBudget) -> list[Answer]:
        while True:
            told = call.args_for(self.attempts[0])
            self.told.append(told)
            if all(answers for (_, is_needed, _), answers in zip(told, self.attempts[0], strict=True) if is_needed):
                asked = zip(told, self.attempts[0], strict=True)
                return [answers.pop(0) if is_needed else [] for (_, is_needed, _), answers in asked]
            del self.attempts[0]


class Checkpoints:
    """Counts checkpoints."""

    next_index = 0

    def add(self, score: Any, receive: Callable[[], Any] | None) -> None:
        self.next_index += 1

    def flush(self) -> None:
        """There is nothing on its way."""


def run_on(group: Group) -> FunctionRun:
    made: Any = group, group, lambda data: data, Checkpoints()
    return FunctionRun(*made, LossCounter(2))


def steps_of(run: FunctionRun) -> list[tuple[Any, ...]]:
    found = []
    while (step := run.next_step()).kind is not None:
        found.append(step.data)
    return found


def reports(*numbers: int) -> Answer:
    return [FunctionMessage(REPORT, number) for number in numbers]


def test_a_step_has_the_reports_of_all_ranks_however_far_each_is() -> None:
    group = Group(
        [[reports(1, 2, 3), [FunctionEnded("a")]], [reports(10), reports(20), [*reports(30), FunctionEnded("b")]]]
    )
    run = run_on(group)
    assert steps_of(run) == [(1, 10), (2, 20), (3, 30)]
    assert run.returned == ["a", "b"]
    assert [[is_needed for _, is_needed, _ in told] for told in group.told] == [
        [True, True],
        [False, True],
        [False, True],
        [True, False],
    ]


def test_reports_of_lost_workers_are_made_again_by_those_that_follow_and_count_once() -> None:
    lost = [[reports(1, 2, 3)], [reports(10), reports(20)]]
    run = run_on(Group(lost, [[reports(3, 4), [FunctionEnded()]], [reports(30, 40), [FunctionEnded()]]]))
    assert steps_of(run) == [(1, 10), (2, 20), (3, 30), (4, 40)]


def test_a_rank_is_told_the_number_of_a_checkpoint_when_all_before_it_were_taken() -> None:
    saved = FunctionMessage(REPORT, 2, CheckpointRef(files=("a",)))
    group = Group(
        [[[FunctionMessage(REPORT, 1), saved], [FunctionEnded()]], [reports(10), reports(20), [FunctionEnded()]]]
    )
    assert steps_of(run_on(group)) == [(1, 10), (2, 20)]
    assert [[index for index, _, _ in told] for told in group.told] == [[0, 0], [0, 0], [1, 1]]


class Storing(Group):
    """A group whose ranks store folders: each answers with the names that were taken; the first group dies of it.

    Attributes:
        stored: What the ranks were told, call by call.
    """

    def __init__(self, *attempts: Sequence[list[Answer]], dies: bool = False) -> None:
        super().__init__(*attempts)
        self.stored: list[list[tuple[Any, ...]]] = []
        self.dies = dies

    def run(self, call: Any, budget: RetryBudget) -> list[Any]:
        if call.function is not FunctionReplica.store:
            return super().run(call, budget)
        assert not call.changes_state
        if self.dies:
            del self.attempts[0]
        self.stored.append(call.args_for(self.attempts[0]))
        return [None if self.dies else list(taken) for _, taken in self.stored[-1]]


def saving(number: int, token: int | None, *files: str) -> Answer:
    return [FunctionMessage(REPORT, number, CheckpointRef(token=token, files=files))]


def test_ranks_store_their_folders_those_behind_whose_names_they_use(caplog: pytest.LogCaptureFixture) -> None:
    group = Storing([[saving(1, None, "a"), [FunctionEnded()]], [saving(2, 7, "a", "b"), [FunctionEnded()]]])
    run = run_on(group)
    assert steps_of(run) == [(1, 2)]
    assert group.stored == [[(None, ()), (7, ("a",))]]
    assert (
        "rank 1 reported checkpoints with files of the same names as lower ranks, but other content: `a`" in caplog.text
    )
    assert run._checkpoints.next_index == 1  # type: ignore[attr-defined]

    group = Storing([[saving(1, 3, "a"), [FunctionEnded()]], [saving(2, 7, "a"), [FunctionEnded()]]])
    assert steps_of(run_on(group)) == [(1, 2)]
    assert group.stored == [[(3, ()), (None, ("a",))], [(None, ()), (7, ("a",))]]


def test_a_step_whose_folders_are_lost_with_their_workers_is_that_of_those_that_follow() -> None:
    lost = [[saving(1, None, "a")], [saving(2, 7, "b")]]
    group = Storing(lost, [[reports(10), [FunctionEnded()]], [reports(20), [FunctionEnded()]]], dies=True)
    run = run_on(group)
    assert steps_of(run) == [(10, 20)]
    assert group.stored == [[(None, ()), (None, ())]]
    assert run._checkpoints.next_index == 0  # type: ignore[attr-defined]


def test_ranks_that_run_ahead_must_report_equally_often() -> None:
    run = run_on(Group([[reports(1, 2), [FunctionEnded()]], [[*reports(10), FunctionEnded()]]]))
    run.next_step()
    run._controller.kill_group = lambda: None  # type: ignore[method-assign]
    with pytest.raises(StepMismatchError, match="ended on rank 1,"):
        run.next_step()
