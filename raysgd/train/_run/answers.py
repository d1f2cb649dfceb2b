"""Answers to what all functions ask in step: the driver takes the question of each rank, and answers all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from raysgd.air.reports import PreemptionInfo
from raysgd.exceptions import StepMismatchError
from raysgd.train._worker.messages import BROADCAST, PREEMPTION, REPORTED, Question


def questions_in(messages: Sequence[Any]) -> Sequence[Question]:
    """Return what all functions ask; nothing where they do something else.

    Raises:
        StepMismatchError: Some ask, and others do not, or ask for something else.
    """
    told = {rank: message for rank, message in enumerate(messages) if message is not None}
    names = {rank: message.name if isinstance(message, Question) else None for rank, message in told.items()}
    if len(set(names.values())) > 1:
        said = ", ".join(f"rank {rank}: {name or type(messages[rank]).__name__}" for rank, name in names.items())
        raise StepMismatchError(
            "The functions are out of step: all workers have to call the functions of `raysgd.train.collective`, "
            f"`{PREEMPTION}` and `{REPORTED}` at the same place. What they did: {said}."
        )
    return [message for message in messages if isinstance(message, Question)]


def answer_to(questions: Sequence[Question], answers: Mapping[str, Callable[[], Any]]) -> bytes:
    """Return the answer for all ranks, pickled; None to what this run knows nothing of."""
    name = questions[0].name
    if name == BROADCAST:
        return questions[0].data
    found: bytes = cloudpickle.dumps(answers[name]() if name in answers else None)
    return found


def preemption_of(nodes: Sequence[str], deadlines: Mapping[str, int]) -> PreemptionInfo | None:
    """Return what is about to be taken away; None where no worker is on such a node.

    >>> preemption_of(["a", "b", "a"], {"a": 7000, "c": 1}).preempted_node_to_ranks
    {'a': [0, 2]}

    Args:
        nodes: The node of each rank.
        deadlines: When each node that is about to go does, in milliseconds; 0 if no time was said.
    """
    ranks = {node: [rank for rank, place in enumerate(nodes) if place == node] for node in nodes if node in deadlines}
    times = [deadlines[node] for node in ranks if deadlines[node]]
    return PreemptionInfo(min(times, default=None), ranks) if ranks else None
