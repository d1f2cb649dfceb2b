"""Signs of life: time as this process lives it, open questions, and how long those are waited for who do not answer.

A live worker answers beside its work, mostly at once. But a machine may stall for seconds, and where thousands are
asked the answers themselves take seconds to come in: no fixed time tells who is gone.

Why silence is relative to those who answer: ADR 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, Generic, TypeVar

from raysgd.engine.shared.types import Outcome

_LONGEST_GAP_S = 1.0


class OwnTime:
    """Counts seconds from when it is made on, as long as it is looked at often.

    For limits on how long to wait for others: what happens to this process, such as SIGSTOP or a machine that stalls,
    does not shorten their time. They may have stood still for as long.

    Args:
        now: Time.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked_at, self._seconds = now(), 0.0

    def look(self, at_most_s: float = _LONGEST_GAP_S) -> float:
        """The seconds until now; since the last look no more than so many, whatever the clock says."""
        now = self._now()
        self._seconds += min(now - self._looked_at, at_most_s)
        self._looked_at = now
        return self._seconds

    def catch_up(self) -> None:
        """Count all until now: this process did something else, which took it so long."""
        self.look(float("inf"))


_SHORTEST_S = 2.0
_PART_OF_HEARTBEAT = 5
_TIMES_TYPICAL = 10


def quiet_s(heartbeat_s: float) -> float:
    """Return the time for which nothing more has to come in before those who are missing are silent."""
    return max(_SHORTEST_S, heartbeat_s / _PART_OF_HEARTBEAT)


def max_silence_s(answered_after_s: Sequence[float], num_missing: int, num_others: int, heartbeat_s: float) -> float:
    """Return how long to wait, from the question on, for those who are missing.

    While answers come in, the wait goes on: it ends when none has come for a while, and those who are missing take many
    times as long as the typical one. Where most are missing, they are probably just slow: no rank is silent then before
    the time has passed that a frozen process gets, either.

    Args:
        answered_after_s: When the others answered, seconds from the question on.
        num_missing: How many have not.
        num_others: How many more of the group are known to live, because they had answered before.
        heartbeat_s: What a worker that gives no sign of life gets.
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
_ROUNDS_PER_HEARTBEAT = 3  # with the default of 30 s, 1,000 ranks still cost no more than the share below
_QUESTION_S = 0.0005  # of the driver's time, for one question and its answer
_SHARE = 0.05  # of the driver's time that questions may take


class LivenessCheck(Generic[KeyT]):
    """Keeps the questions that are open. Seconds in which this process did not look at them do not count.

    Args:
        heartbeat_s: A worker that does not answer for so long is silent.
        poll: What became of a question, as of now.
        now: Time.
    """

    def __init__(self, heartbeat_s: float, poll: Callable[[KeyT, Any], Outcome], now: Callable[[], float]) -> None:
        self._heartbeat_s, self._poll, self._own_time = heartbeat_s, poll, OwnTime(now)
        self._asked: dict[KeyT, tuple[Any, float]] = {}

    def round_s(self, num_keys: int, wanted_s: float = _ROUND_S) -> float:
        """Time from one round of questions to the next: as wanted, longer for many workers, but still often enough."""
        return min(max(wanted_s, num_keys * _QUESTION_S / _SHARE), self._heartbeat_s / _ROUNDS_PER_HEARTBEAT)

    def ask(self, keys: Iterable[KeyT], submit: Callable[[KeyT], Any]) -> None:
        """Ask all who do not owe an answer already."""
        for key in keys:
            if key not in self._asked:
                self._asked[key] = submit(key), self._own_time.look()

    def poll(self) -> tuple[list[tuple[KeyT, Outcome]], list[tuple[KeyT, float]]]:
        """Look who has answered since the last time.

        Returns:
            Who answered, and what; and who has not for too long, and for how many seconds. Those are not waited for
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
        """Say that until now this process was here to poll."""
        self._own_time.catch_up()

    def remove(self, key: KeyT) -> None:
        """Expect no answer from `key` any more."""
        self._asked.pop(key, None)
