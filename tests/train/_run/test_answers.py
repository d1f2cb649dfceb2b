"""What the driver answers to what all functions ask."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from raysgd.exceptions import StepMismatchError
from raysgd.train._run.answers import answer_to, preemption_of, questions_in
from raysgd.train._worker.mailbox import FunctionEnded
from raysgd.train._worker.messages import BROADCAST, PREEMPTION, FunctionMessage, Question, TrainingResultType

REPORT = FunctionMessage(TrainingResultType.REPORT, 1)


@pytest.mark.parametrize(
    ("messages", "is_question"),
    [
        ([REPORT, REPORT], False),
        ([FunctionEnded(), FunctionEnded()], False),
        ([Question(PREEMPTION), Question(PREEMPTION)], True),
    ],
)
def test_what_all_functions_do_is_a_question_or_not(messages: Sequence[Any], is_question: bool) -> None:
    assert questions_in(messages) == (messages if is_question else [])


@pytest.mark.parametrize("other", [REPORT, FunctionEnded(), Question(BROADCAST)])
def test_functions_that_do_something_else_are_out_of_step(other: Any) -> None:
    with pytest.raises(StepMismatchError, match=r"out of step.*rank 0: get_preemption_info, rank 1: "):
        questions_in([Question(PREEMPTION), other])


def test_all_ranks_get_what_rank_0_said() -> None:
    questions = [Question(BROADCAST, pickle.dumps(rank)) for rank in range(3)]
    assert pickle.loads(answer_to(questions, {})) == 0


def test_other_questions_are_answered_by_who_knows_and_with_nothing_where_no_one_does() -> None:
    assert pickle.loads(answer_to([Question("size")], {"size": lambda: 3})) == 3
    assert pickle.loads(answer_to([Question("size")], {})) is None


def test_a_preemption_names_the_ranks_and_the_first_deadline() -> None:
    assert preemption_of(["a", "b"], {}) is None
    assert preemption_of(["a", "b"], {"c": 5}) is None
    info = preemption_of(["a", "b", "a", "d"], {"a": 7000, "b": 5000, "c": 1})
    assert (info.deadline_ms, info.preempted_node_ids, info.preempted_ranks) == (5000, ["a", "b"], [0, 1, 2])
    without_time = preemption_of(["a"], {"a": 0})
    assert without_time.deadline_ms is None
