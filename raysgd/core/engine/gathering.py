"""Gathers the answers to remote calls, and decides how long to wait for the others after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from raysgd.core.engine.liveness import OwnTime, max_silence_s
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared.types import FailureKind, Outcome
from raysgd.exceptions import OnFailure

_DEATH_GRACE_S = 0.05  # how long to wait after a death: simultaneous deaths are reported within this time
_CONNECTION_GRACE_S = 5.0  # a lost connection nearly always means a death, which Ray reports a little later
_SHORT_CONNECTION_GRACE_S = 0.3  # if survivors will be asked anyway: a lost node may be reported much later
_USER_GRACE_S = 1.0  # after an exception in user code: ranks that wait for its rank in a collective never answer
_LONGEST_USER_GRACE_S = 5.0  # after a late exception: other ranks may reach the same one even later
_POLL_S = 0.1
_LOOK_S = 0.005
_TICK_S = 0.001  # anything shorter counts as zero, because sums of seconds are not exact
_POLL_S_EACH = 0.0005  # per call: polling a thousand calls takes Ray a millisecond


class Listener:
    """Gathers the answers of remote calls, and decides how long to keep waiting after a failure.

    Args:
        references: The calls, by rank.
        asks_survivors: True if the survivors will be asked which ranks are alive. Then there is no need to wait for the
            cause of a broken connection.
        platform: Receives the answers; Ray by default.
    """

    def __init__(
        self, references: Mapping[int, Any], asks_survivors: bool = False, platform: Platform | None = None
    ) -> None:
        self._references = references
        self._asks_survivors = asks_survivors
        self._platform = platform or Platform()
        self._is_stopped = False
        self._is_in_on_wait = False
        self._kinds_of_driver: set[FailureKind] = set()
        self._began = self._platform.now()
        self._failed_at = self._began
        self._listened_s = self._last_answer_s = 0.0

    def stop(self, kinds: Collection[FailureKind] = ()) -> None:
        """Wait only for the usual grace period from now on, because the local rank failed. Called from another thread.

        After this returns, `on_wait` is not running and will not be called again, so what it uses can be closed. This
        holds even if Ctrl-C is pressed once during this method. A second Ctrl-C ends the wait.

        Args:
            kinds: The kinds of failure of the local rank.
        """
        self._kinds_of_driver |= set(kinds)
        self._is_stopped = True
        with OnFailure(self._await_on_wait):
            self._await_on_wait()

    def _await_on_wait(self) -> None:
        while self._is_in_on_wait:
            self._platform.sleep(_LOOK_S)

    def listen(self, on_wait: Callable[[], None] | None = None) -> dict[int, Outcome]:
        """Return the outcomes by rank. Blocks until all ranks have answered or the cause of a failure is clear."""
        if not self._references:
            return {}
        values = self._wait_for_all_or_first_failure(on_wait)
        if values is not None:
            return {rank: Outcome(rank, value) for rank, value in zip(self._references, values, strict=True)}
        return self._look_closer()

    def _wait_for_all_or_first_failure(self, on_wait: Callable[[], None] | None) -> list[Any] | None:
        pause_s = None
        is_beside_local = threading.current_thread() is not threading.main_thread()
        if on_wait or is_beside_local:
            pause_s = max(_POLL_S, _POLL_S_EACH * len(self._references))
        waiting = {reference: rank for rank, reference in self._references.items()}
        values: dict[int, Any] = {}
        while waiting and not self._is_stopped:
            done = self._platform.any_ready(list(waiting), pause_s)
            if not done and on_wait is not None:
                self._is_in_on_wait = True  # set before reading `_is_stopped`: `stop` writes that one, then reads this
                try:
                    if not self._is_stopped:
                        on_wait()
                finally:
                    self._is_in_on_wait = False
            for reference in done:
                found = self._platform.outcome(waiting[reference], reference)
                if found.failure is not None:
                    return None
                if found.answered:
                    values[waiting.pop(reference)] = found.value
        return None if waiting else [values[rank] for rank in self._references]

    def _look_closer(self) -> dict[int, Outcome]:
        """Wait until the kind of failure is clear: see the grace periods above."""
        self._failed_at, own_time = self._platform.now(), OwnTime(self._platform.now)
        outcomes = {rank: self._platform.outcome(rank, reference) for rank, reference in self._references.items()}
        while waiting := {self._references[rank]: rank for rank, found in outcomes.items() if not found.answered}:
            pause_s = min(self.left_s(outcomes), _POLL_S)
            if pause_s < _TICK_S:
                break
            answered = self._platform.any_ready(list(waiting), pause_s)
            for reference in answered:
                outcomes[waiting[reference]] = self._platform.outcome(waiting[reference], reference)
            self._listened_s = own_time.look(pause_s)
            if answered:
                self._last_answer_s = self._listened_s
        return outcomes

    def left_s(self, outcomes: Mapping[int, Outcome]) -> float:
        """Return how much longer to wait for the missing ranks, given these failures and those of the driver's rank."""
        kinds = self._kinds_of_driver | {found.failure.kind for found in outcomes.values() if found.failure}
        ran_s = self._failed_at - self._began
        return grace_s(kinds, self._asks_survivors, ran_s, self._last_answer_s) - self._listened_s


def grace_s(
    kinds: Set[FailureKind], asks_survivors: bool = False, ran_s: float = 0.0, last_answer_s: float = 0.0
) -> float:
    """Return how long to wait after the first of these failures.

    Args:
        kinds: The kinds of failure known so far.
        asks_survivors: True if the survivors will be asked which ranks are alive.
        ran_s: How long the call had run.
        last_answer_s: Time of the last answer, in seconds after the first failure.
    """
    if "died" in kinds:  # a rank that answers now need not be asked later
        return min(last_answer_s + _DEATH_GRACE_S, _SHORT_CONNECTION_GRACE_S) if asks_survivors else _DEATH_GRACE_S
    if kinds == {"disconnected"}:
        return _SHORT_CONNECTION_GRACE_S if asks_survivors else _CONNECTION_GRACE_S
    return min(max(_USER_GRACE_S, ran_s), _LONGEST_USER_GRACE_S)


def roll_call(
    platform: Platform, references: Mapping[int, Any], num_others: int, heartbeat_s: float
) -> dict[int, Outcome]:
    """Ask which ranks are alive and wait for their answers. Return the outcomes, including those of silent ranks.

    Args:
        platform: Receives the answers.
        references: The questions, by rank.
        num_others: Number of other ranks that are known to be alive.
        heartbeat_s: A worker that sends no heartbeat for so long counts as lost.
    """
    outcomes = {rank: Outcome(rank, answered=False) for rank in references}
    ranks = {reference: rank for rank, reference in references.items()}
    answered_after_s: list[float] = []
    waited_s, own_time = 0.0, OwnTime(platform.now)
    while ranks and waited_s < max_silence_s(answered_after_s, len(ranks), num_others, heartbeat_s):
        ready = platform.ready(ranks.keys(), _POLL_S)
        waited_s = own_time.look()
        polled = [platform.outcome(ranks.pop(reference), reference) for reference in ready]
        outcomes |= {found.rank: found for found in polled}
        answered_after_s += [waited_s for found in polled if found.ok]  # dead ranks say nothing about live ones
    return outcomes


def await_all(platform: Platform, references: Collection[Any], timeout_s: float) -> None:
    """Wait until all of these calls have ended, up to `timeout_s`, not counting time in which this process stood still.

    Args:
        platform: Receives the answers.
        references: The calls.
        timeout_s: How long to wait, on a machine that does not stall.
    """
    own_time = OwnTime(platform.now)
    while own_time.look() < timeout_s:
        if len(platform.ready(references, _POLL_S)) == len(references):
            return
