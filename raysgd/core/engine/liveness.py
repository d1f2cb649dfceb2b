"""Liveness checks: open questions to workers, and how long to wait for those that do not answer.

A live worker answers while it works, mostly at once. But a machine may stall for seconds, and the answers of thousands
of workers take seconds to arrive. So no fixed time tells which workers are dead.

ADR 9 explains why silence is measured relative to the workers that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

from raysgd.core.engine.shared.types import Outcome

_LONGEST_GAP_S = 1.0


class OwnTime:
    """Counts the seconds since it was made, without those in which this process stood still. Read it often.

    For deadlines of others. If this process is stopped (SIGSTOP) or its machine stalls, others may have stood still
    too, so their time is not shortened.

    Args:
        now: Clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked_at, self._seconds = now(), 0.0

    def look(self, at_most_s: float = _LONGEST_GAP_S) -> float:
        """Return the seconds so far. At most `at_most_s` are counted since the last look, whatever the clock says."""
        now = self._now()
        self._seconds += min(now - self._looked_at, at_most_s)
        self._looked_at = now
        return self._seconds

    def catch_up(self) -> None:
        """Count all the time until now, because this process was busy with something else."""
        self.look(float("inf"))


_SHORTEST_S = 2.0
_PART_OF_HEARTBEAT = 5
_TIMES_TYPICAL = 10


def quiet_s(heartbeat_s: float) -> float:
    """Return how long no answer has to arrive before the missing ranks count as silent."""
    return max(_SHORTEST_S, heartbeat_s / _PART_OF_HEARTBEAT)


def max_silence_s(answered_after_s: Sequence[float], num_missing: int, num_others: int, heartbeat_s: float) -> float:
    """Return how long to wait for the missing ranks, counted from the question.

    While answers arrive, the wait continues. It ends when none has arrived for a while, and the missing ranks take many
    times as long as the typical rank. If most are missing, they are probably just slow. Then no rank counts as silent
    before the time that a frozen process gets.

    Args:
        answered_after_s: Seconds from the question until each answer.
        num_missing: Number of ranks that have not answered.
        num_others: Number of other ranks that are known to be alive, because they answered before.
        heartbeat_s: A worker that sends no heartbeat for so long counts as lost.
    """
    quiet = quiet_s(heartbeat_s)
    if num_missing > len(answered_after_s) + num_others:
        return max(quiet, heartbeat_s)
    if not answered_after_s:
        return quiet
    wanted = max(max(answered_after_s) + quiet, _TIMES_TYPICAL * median(answered_after_s))
    return min(wanted, max(quiet, heartbeat_s, max(answered_after_s) + quiet))


KeyT = TypeVar("KeyT")

_ROUND_S = 1.0
_ROUNDS_PER_HEARTBEAT = 3  # with a heartbeat of 30 s, questions to 1,000 ranks stay below `_SHARE`
_QUESTION_S = 0.0005  # driver's time for one question and its answer
_SHARE = 0.05  # largest share of the driver's time that questions may take


class LivenessCheck(Generic[KeyT]):
    """Keeps open questions to workers. Seconds in which this process did not look at them do not count.

    Args:
        heartbeat_s: A worker that does not answer for so long is silent.
        poll: Returns the present outcome of a question.
        now: Clock, in seconds.
    """

    def __init__(self, heartbeat_s: float, poll: Callable[[KeyT, Any], Outcome], now: Callable[[], float]) -> None:
        self._heartbeat_s, self._poll, self._own_time = heartbeat_s, poll, OwnTime(now)
        self._asked: dict[KeyT, tuple[Any, float]] = {}

    def round_s(self, num_keys: int, wanted_s: float = _ROUND_S) -> float:
        """Return the time between two rounds of questions: `wanted_s`, or more for many workers, within limits."""
        return min(max(wanted_s, num_keys * _QUESTION_S / _SHARE), self._heartbeat_s / _ROUNDS_PER_HEARTBEAT)

    def ask(self, keys: Iterable[KeyT], submit: Callable[[KeyT], Any]) -> None:
        """Ask all workers that do not have an open question."""
        for key in keys:
            if key not in self._asked:
                self._asked[key] = submit(key), self._own_time.look()

    def poll(self) -> tuple[list[tuple[KeyT, Outcome]], list[tuple[KeyT, float]]]:
        """Check which workers have answered since the last time.

        Returns:
            The answers by worker, and the workers that are silent with their seconds of silence. Neither are waited for
            any more.
        """
        now = self._own_time.look()
        answers, silent = list[tuple[KeyT, Outcome]](), list[tuple[KeyT, float]]()
        for key, (question, asked_at) in list(self._asked.items()):
            found = self._poll(key, question)
            if found.answered:
                answers.append((key, found))
            elif now - asked_at > self._heartbeat_s:
                silent.append((key, now - asked_at))
            else:
                continue
            del self._asked[key]
        self.rest()
        return answers, silent

    def rest(self) -> None:
        """Count all the time until now as time in which this process was polling."""
        self._own_time.catch_up()

    def remove(self, key: KeyT) -> None:
        """Stop waiting for an answer from `key`."""
        self._asked.pop(key, None)
