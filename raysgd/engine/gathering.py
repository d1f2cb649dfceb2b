"""Listening to remote calls: which ranks answered, what became of the others, and how long to wait to understand it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from raysgd.engine.liveness import OwnTime, max_silence_s
from raysgd.engine.platform import Platform
from raysgd.engine.shared.types import FailureKind, Outcome
from raysgd.exceptions import OnFailure

_DEATH_GRACE_S = 0.05  # how long to listen on after a death: other deaths of the same moment follow within this
_CONNECTION_GRACE_S = 5.0  # a lost connection is nearly always the shadow of a death that Ray reports a little later
_SHORT_CONNECTION_GRACE_S = 0.3  # where survivors are asked next: the loss of a node may be reported much later
_USER_GRACE_S = 1.0  # after an exception in user code: ranks that wait for that rank in a collective never answer
_LONGEST_USER_GRACE_S = 5.0  # after an exception that came late: others that come to the same one may come later still
_POLL_S = 0.1
_LOOK_S = 0.005
_TICK_S = 0.001  # what is less is nothing: sums of seconds are not exact
_POLL_S_EACH = 0.0005  # for each call: a look at a thousand of them takes Ray a millisecond


class Listener:
    """Gathers the answers of remote calls, and decides how long to listen on after a failure.

    Args:
        references: The calls, by rank.
        asks_survivors: Whether the survivors will be asked who is alive, so that a broken connection needs no
            explanation.
        platform: Hears them; Ray by default.
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
        """From another thread, when the local rank failed, in these ways: the others get the usual grace, no more.

        When this returns, `on_wait` is over, and is not called again: what it looks at can be ended. That holds, too,
        where Ctrl-C is pressed once meanwhile; a second time ends the wait.
        """
        self._kinds_of_driver |= set(kinds)
        self._is_stopped = True
        with OnFailure(self._await_on_wait):
            self._await_on_wait()

    def _await_on_wait(self) -> None:
        while self._is_in_on_wait:
            self._platform.sleep(_LOOK_S)

    def listen(self, on_wait: Callable[[], None] | None = None) -> dict[int, Outcome]:
        """The outcomes by rank. Blocks until all have answered or a failure has been understood."""
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
                self._is_in_on_wait = True  # before the look at what `stop` sets before it looks at this
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
        """Listen until the kind of failure is plain: see the grace periods above."""
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
        """Return how long those who are missing still have, after these failures and those of the driver itself."""
        kinds = self._kinds_of_driver | {found.failure.kind for found in outcomes.values() if found.failure}
        ran_s = self._failed_at - self._began
        return grace_s(kinds, self._asks_survivors, ran_s, self._last_answer_s) - self._listened_s


def grace_s(
    kinds: Set[FailureKind], asks_survivors: bool = False, ran_s: float = 0.0, last_answer_s: float = 0.0
) -> float:
    """Return how long to listen on after failures of these kinds, from the first one on.

    Args:
        kinds: What is known by now.
        asks_survivors: Whether the survivors will be asked who is alive.
        ran_s: How long the call had run.
        last_answer_s: When the last answer came, since the first failure.
    """
    if "died" in kinds:  # survivors that still answer need not be asked
        return min(last_answer_s + _DEATH_GRACE_S, _SHORT_CONNECTION_GRACE_S) if asks_survivors else _DEATH_GRACE_S
    if kinds == {"disconnected"}:
        return _SHORT_CONNECTION_GRACE_S if asks_survivors else _CONNECTION_GRACE_S
    return min(max(_USER_GRACE_S, ran_s), _LONGEST_USER_GRACE_S)


def roll_call(
    platform: Platform, references: Mapping[int, Any], num_others: int, heartbeat_s: float
) -> dict[int, Outcome]:
    """Wait for each rank to answer whether it lives; return the outcomes, also those of ranks that stayed silent.

    Args:
        platform: Hears them.
        references: The questions, by rank.
        num_others: How many more of the group are known to live.
        heartbeat_s: What a worker that gives no sign of life gets.
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
        answered_after_s += [waited_s for found in polled if found.ok]  # the dead tell nothing of the living
    return outcomes


def await_all(platform: Platform, references: Collection[Any], timeout_s: float) -> None:
    """Wait until all of these came to an end, or for so long; seconds in which this process stood still do not count.

    Args:
        platform: Hears them.
        references: The calls.
        timeout_s: How long, on a machine that does not stall.
    """
    own_time = OwnTime(platform.now)
    while own_time.look() < timeout_s:
        if len(platform.ready(references, _POLL_S)) == len(references):
            return
