"""The run of a function in the driver: steps, questions, and starts on groups of workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.core.engine.policies import RetryBudget
from raysgd.core.engine.shared.types import World
from raysgd.core.state.state_codec import decode
from raysgd.exceptions import StepMismatchError
from raysgd.train._function_run import FunctionRun, check_step, questions_in
from raysgd.train._worker.function_replica import FunctionReplica, FunctionReplicas
from raysgd.train._worker.messages import (
    BROADCAST,
    PREEMPTION,
    CheckpointRef,
    FunctionEnded,
    FunctionMessage,
    FunctionSpec,
    Question,
    TrainingResultType,
)
from raysgd.train._worker.shards import DividedData
from raysgd.train.checkpoint import CheckpointManager
from tests.streams.made import MadeStream

REPORT, CHECKPOINT = TrainingResultType.REPORT, TrainingResultType.CHECKPOINT
SPEC = FunctionSpec(int, dict, "score")


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


def test_a_rank_that_does_not_report_yet_is_left_out() -> None:
    step = check_step([None, FunctionMessage(REPORT, 2, CheckpointRef(2.0)), FunctionMessage(REPORT, 3)])
    assert (step.data, step.source) == ((2, 3), 1)
    assert check_step([None, FunctionEnded("b")]).data == ("b",)


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

    num_workers = max_workers = 2
    num_changes = 0
    resize_interval_s = 60.0
    joined: Mapping[Any, int] = {}
    decode = staticmethod(dict)

    def __init__(self, *attempts: Sequence[list[Answer]]) -> None:
        self.attempts = [[list(answers) for answers in ranks] for ranks in attempts]
        self.num_started, self.num_starts = 1, 0
        self.group = self.controller = self
        self.checkpoints: Any = Checkpoints()
        self.budget = RetryBudget(1)
        self.infos = list(range(len(attempts[0])))
        self.workers = SimpleNamespace(workers=())
        self.replicas = FunctionReplicas()
        self.told: list[list[tuple[Any, ...]]] = []

    def on_training_start(self) -> None:
        self.num_starts += 1

    def share(self, value: Any) -> list[Any]:
        return [value] * len(self.infos)

    def store(self, value: Any) -> Any:
        return SimpleNamespace(reference=value)

    def die(self) -> None:
        del self.attempts[0]
        self.num_started += 1

    def run(self, call: Any, budget: RetryBudget) -> list[Answer]:
        while True:
            told = [each[:3] for each in call.args_for(self.attempts[0])]
            self.told.append(told)
            if all(answers for (_, is_needed, _), answers in zip(told, self.attempts[0], strict=True) if is_needed):
                asked = zip(told, self.attempts[0], strict=True)
                return [answers.pop(0) if is_needed else [] for (_, is_needed, _), answers in asked]
            self.die()


class Checkpoints:
    """Counts checkpoints."""

    next_index = 0
    restart_point = None

    def begin_attempt(self) -> None: ...

    def add(self, score: Any, receive: Callable[[], Any] | None) -> None:
        self.next_index += 1

    def flush(self) -> None:
        """There is nothing on its way."""


def run_on(group: Group) -> FunctionRun:
    return FunctionRun(cast(Any, group), SPEC)


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
    assert [[request.index for request, _, _ in told] for told in group.told] == [[0, 0], [0, 0], [1, 1]]


class Storing(Group):
    """A group whose ranks store folders; the first group dies of it if it is to.

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
            self.die()
        self.stored.append([each[:2] for each in call.args_for(self.attempts[0])])
        return [not self.dies] * len(self.stored[-1])


def saving(number: int, token: int | None, *files: str) -> Answer:
    return [FunctionMessage(REPORT, number, CheckpointRef(token=token, files=files))]


def test_ranks_store_their_folders_without_the_names_of_lower_ones(caplog: pytest.LogCaptureFixture) -> None:
    group = Storing([[saving(1, None, "a"), [FunctionEnded()]], [saving(2, 7, "a", "b"), [FunctionEnded()]]])
    run = run_on(group)
    assert steps_of(run) == [(1, 2)]
    assert group.stored == [[(None, ()), (7, ("a",))]]
    assert "rank 1 reported checkpoints with files of the same names as lower ranks, such as `a`" in caplog.text
    assert run._checkpoints.next_index == 1  # type: ignore[attr-defined]

    group = Storing([[saving(1, 3, "a"), [FunctionEnded()]], [saving(2, 7, "a"), [FunctionEnded()]]])
    assert steps_of(run_on(group)) == [(1, 2)]
    assert group.stored == [[(3, ()), (7, ("a",))]]


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


# ------------------------------------------------------------------------------------------------------- questions

REPORTED = FunctionMessage(REPORT, 1)


@pytest.mark.parametrize(
    ("messages", "is_question"),
    [
        ([REPORTED, REPORTED], False),
        ([FunctionEnded(), FunctionEnded()], False),
        ([Question(PREEMPTION), Question(PREEMPTION)], True),
    ],
)
def test_what_all_functions_do_is_a_question_or_not(messages: Sequence[Any], is_question: bool) -> None:
    assert questions_in(messages) == (messages if is_question else [])


@pytest.mark.parametrize("other", [REPORTED, FunctionEnded(), Question(BROADCAST)])
def test_functions_that_do_something_else_are_out_of_step(other: Any) -> None:
    with pytest.raises(StepMismatchError, match=r"out of step.*rank 0: get_preemption_info, rank 1: "):
        questions_in([Question(PREEMPTION), other])


def test_all_ranks_get_what_rank_0_said_or_what_the_driver_knows() -> None:
    for name, answer in ((BROADCAST, 0), (PREEMPTION, 7)):
        asked: list[list[Answer]] = [
            [cast(Answer, [Question(name, pickle.dumps(rank))]), [FunctionEnded()]] for rank in range(2)
        ]
        group = Group(asked)
        run = run_on(group)
        run._find_preemption = lambda: cast(Any, 7)  # type: ignore[method-assign]
        assert steps_of(run) == []
        first, second = ([request.answer for request, _, _ in told] for told in group.told)
        assert first == [b"", b""]
        assert [pickle.loads(each) for each in second] == [answer, answer]


# ---------------------------------------------------------------------------------------- starts on a group of workers


class Numbers:
    def split(self, n: int, *, equal: bool) -> list[Any]:
        return [range(10)[rank::n] for rank in range(n)]


@pytest.fixture
def checkpoints() -> CheckpointManager:
    made = CheckpointManager()
    made.begin_run(None)
    return made


def run_with(
    checkpoints: CheckpointManager, size: int = 2, data: Any = None, is_elastic: bool = False
) -> tuple[FunctionRun, Any]:
    hooks: Any = Group([[]] * size)
    hooks.checkpoints = checkpoints
    divided = DividedData(data) if data is not None else None
    return FunctionRun(hooks, replace(SPEC, is_elastic=is_elastic), divided), hooks


def worlds(size: int) -> list[World]:
    return [World(rank, size) for rank in range(size)]


def test_a_function_is_started_once_on_a_group(checkpoints: CheckpointManager) -> None:
    made, hooks = run_with(checkpoints)
    first = worlds(2)
    assert made._starts(first) == [(SPEC, None, None)] * 2
    assert made._starts(first) == [(), ()]
    assert made._members == {0: 0, 1: 0}
    assert hooks.num_starts == 1


def test_others_can_step_in_where_no_part_of_the_data_was_given_away(checkpoints: CheckpointManager) -> None:
    stream = MadeStream([4, 4]).batch(4)
    cases = ((None, True), (stream, True), ({"train": stream}, True), (Numbers(), False))
    for data, can_be_joined in (*cases, ({"train": stream, "other": Numbers()}, False)):
        made, hooks = run_with(checkpoints, data=data, is_elastic=True)
        [(spec, *_), _] = made._starts(worlds(2))
        assert spec.has_parts is not can_be_joined
        assert made._can_be_joined is can_be_joined
        assert bool(hooks.replicas.start) is can_be_joined


def test_a_function_is_not_started_again_on_those_that_are_left_of_its_group(checkpoints: CheckpointManager) -> None:
    made, hooks = run_with(checkpoints, size=3)
    made._starts(worlds(3))
    hooks.infos = [0, 2]
    assert made._starts(worlds(2)) == [(), ()]
    assert made._members == {0: 0, 2: 0}
    assert hooks.num_starts == 1


def test_another_group_is_another_start_even_if_it_looks_the_same(checkpoints: CheckpointManager) -> None:
    made, hooks = run_with(checkpoints)
    made._starts(worlds(2))
    hooks.num_started = 2
    assert not made._is_running
    assert made._members == {}
    assert made._starts(worlds(2)) == [(SPEC, None, None)] * 2
    assert hooks.num_starts == 2


def test_a_start_that_fails_is_made_again(checkpoints: CheckpointManager) -> None:
    class Broken(Numbers):
        is_broken = True

        def split(self, n: int, *, equal: bool) -> list[Any]:
            if self.is_broken:
                raise OSError("no such block")
            return super().split(n, equal=equal)

    data, group = Broken(), worlds(2)
    made, _ = run_with(checkpoints, data=data)
    with pytest.raises(OSError, match="no such block"):
        made._starts(group)
    data.is_broken = False
    assert [shard for _, _, shard in made._starts(group)] == [range(0, 10, 2), range(1, 10, 2)]


def test_a_function_starts_from_the_newest_checkpoint(checkpoints: CheckpointManager) -> None:
    checkpoints.begin_run(None, {"epoch": 1})
    made, hooks = run_with(checkpoints)
    assert [decode(packed, copy=True)["epoch"] for _, packed, _ in made._starts(worlds(2))] == [1, 1]
    checkpoints.add(0, lambda: {"epoch": 2})
    hooks.num_started = 2
    assert [decode(packed, copy=True)["epoch"] for _, packed, _ in made._starts(worlds(2))] == [2, 2]


def test_a_function_whose_reports_nobody_reads_is_started_so(checkpoints: CheckpointManager) -> None:
    made, hooks = run_with(checkpoints)
    made._starts(worlds(2))
    made._is_muted, hooks.num_started = True, 2
    assert [spec.is_muted for spec, _, _ in made._starts(worlds(2))] == [True, True]


def test_what_all_ranks_get_alike_is_packed_once(checkpoints: CheckpointManager) -> None:
    first, second = run_with(checkpoints)[0]._starts(worlds(2))
    assert first is second
