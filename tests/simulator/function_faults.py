"""Faults of functions that go on, each put in on purpose. Schedules of random seeds have to find every one of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from raysgd.core.engine import policies
from raysgd.torch.parallel.undo import Undo
from raysgd.train._function_run import MessageQueues
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._torch.loaders import RepeatingLoader
from raysgd.train._worker.function_replica import FunctionReplica, Session
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import Mailbox
from tests.simulator.mutations import Mutation, nothing


def _counts_in_any_case(real: Any) -> Any:
    def count_step(self: Membership, agree: Any) -> bool:
        real(self, agree)
        return True

    return count_step


def _never_behind(real: Any) -> Any:
    return lambda self, world, is_behind: real(self, world, False)


def _forgets_what_was_taken(real: Any) -> Any:
    def next_messages(self: FunctionReplica, *args: Any) -> Any:
        self._unconfirmed = []
        return real(self, *args)

    return next_messages


def _forgets_queues(real: Any) -> Any:
    def follow(self: MessageQueues, attempt: int | None, members: Any) -> None:
        has_changed = tuple(members) != tuple(self._queues)
        real(self, attempt, members)
        if has_changed:
            self._queues = {member: deque() for member in members}

    return follow


def _takes_over_no_position(real: Any) -> Any:
    return lambda self, position: real(self, position | {"consumed": 0})


def _takes_over_no_epoch(real: Any) -> Any:
    return lambda self, position: real(self, position | {"order": 0})


def _takes_over_no_parts(real: Any) -> Any:
    def take_over(self: GlobalSteps, state: Any) -> None:
        kept, self._shared = self._shared, []
        real(self, {**state, "parts": []})
        self._shared = kept

    return take_over


def _moves_up(real: Any) -> Any:
    return lambda ranks, num_workers: list(range(num_workers))


def _undoes_nothing(real: Any) -> Any:
    return lambda self, record: self.forget(record)


def _waits_for_all(real: Any) -> Any:
    def follow(self: MessageQueues, attempt: int | None, members: Any) -> None:
        real(self, attempt, members)
        self._met = set(members)

    return follow


FAULTS = (
    Mutation("a step counts though not all ranks hold its gradients", Membership, "count_step", _counts_in_any_case),
    Mutation("a rank that waits does not step with those that have", Membership, "join", _never_behind),
    Mutation("the first of two steps of a batch is not undone", Undo, "undo_step", _undoes_nothing),
    Mutation("a group is left while the function is in it", Membership, "leave", nothing),
    Mutation(
        "what is reported in a failed batch is told", Session, "is_repeating", lambda real: property(lambda _: False)
    ),
    Mutation("messages of a call that broke off are lost", FunctionReplica, "next_messages", _forgets_what_was_taken),
    Mutation("messages of survivors are dropped with those of the lost", MessageQueues, "follow", _forgets_queues),
    Mutation("who steps in begins its pass from the start", RepeatingLoader, "take_over", _takes_over_no_position),
    Mutation("who steps in has another order of samples", RepeatingLoader, "take_over", _takes_over_no_epoch),
    Mutation("who steps in keeps its own weights", GlobalSteps, "_take_over", _takes_over_no_parts),
    Mutation("survivors move up where others step in", policies, "next_ranks", _moves_up),
    Mutation("it is not said from where on those report who step in", Mailbox, "post", nothing),
    Mutation("reports are awaited of those that have not met the others", MessageQueues, "follow", _waits_for_all),
)
