"""Finds out which workers have not answered a poll, and decides how long to wait for them.

A live worker usually answers a poll at once, even while it runs a call. But a machine may stall for seconds, and the
answers of thousands of workers take seconds to arrive. A fixed timeout would therefore mistake live workers for dead
workers. Instead, the time without an answer is compared with how fast the other workers answer: see ADR 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Generic, TypeVar

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.engine.shared.types import Outcome

_LONGEST_GAP_S = 1.0


class OwnTime:
    """A clock that counts seconds since its creation, without the time in which this process was stalled.

    This clock measures how long other processes take to answer. If this process is suspended (SIGSTOP) or its machine
    stalls, the other processes may have stalled, too. The time of the stall must therefore not count against them. Call
    `look` often: a long gap between two calls to `look` counts as a stall.

    Args:
        now: Clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked_at, self._seconds = now(), 0.0

    def look(self, at_most_s: float = _LONGEST_GAP_S) -> float:
        """Return the seconds counted so far.

        At most `at_most_s` of the time since the last call to `look` is counted.
        """
        now = self._now()
        self._seconds += min(now - self._looked_at, at_most_s)
        self._looked_at = now
        return self._seconds

    def catch_up(self) -> None:
        """Count the whole time since the last call to `look`.

        In that time, this process was busy rather than stalled.
        """
        self.look(float("inf"))


_SHORTEST_S = 2.0
_PART_OF_HEARTBEAT = 5
_TIMES_TYPICAL = 10


def quiet_s(heartbeat_s: float) -> float:
    """Return after how many seconds without any answer the ranks that have not answered a poll count as silent.

    If most ranks are missing, `max_silence_s` allows more time.
    """
    return max(_SHORTEST_S, heartbeat_s / _PART_OF_HEARTBEAT)


def max_silence_s(answered_after_s: Sequence[float], num_missing: int, num_others: int, heartbeat_s: float) -> float:
    """Return how many seconds after a poll to stop waiting for ranks that have not answered.

    The wait continues while answers arrive. It ends once no answer has arrived for a while and the missing ranks have
    taken many times as long as a typical rank, or longer than `heartbeat_s`. If most ranks are missing, they are
    probably just slow. The wait then lasts at least `heartbeat_s`.

    Args:
        answered_after_s: Seconds from the poll to each answer.
        num_missing: Number of ranks that have not answered.
        num_others: Number of other ranks that are known to be alive, because they answered before.
        heartbeat_s: A worker without a heartbeat for this many seconds counts as lost.
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
# At least this many rounds of polls fit into `heartbeat_s`. With `heartbeat_s=30` and more than 1,000 ranks, polling
# therefore exceeds `_SHARE`.
_ROUNDS_PER_HEARTBEAT = 3
_QUESTION_S = 0.0005  # seconds of the driver's time for one poll and its answer
_SHARE = 0.05  # polling may take at most this fraction of the driver's time


class LivenessCheck(Generic[KeyT]):
    """Keeps track of polls that workers have not answered. Time in which this process was stalled does not count.

    Workers are identified by keys, such as their ranks.

    Args:
        heartbeat_s: A worker that does not answer for this many seconds is silent.
        poll: Returns the current outcome of a poll, given the worker's key and the remote call.
        now: Clock, in seconds.
    """

    def __init__(
        self, heartbeat_s: float, poll: Callable[[KeyT, Reference], Outcome], now: Callable[[], float]
    ) -> None:
        self._heartbeat_s, self._poll, self._own_time = heartbeat_s, poll, OwnTime(now)
        self._asked: dict[KeyT, tuple[Reference, float]] = {}

    def round_s(self, num_keys: int, wanted_s: float = _ROUND_S) -> float:
        """Return the seconds between two rounds of polls: `wanted_s`, or more if there are many workers.

        At least three rounds fit into `heartbeat_s`.
        """
        return min(max(wanted_s, num_keys * _QUESTION_S / _SHARE), self._heartbeat_s / _ROUNDS_PER_HEARTBEAT)

    def ask(self, keys: Iterable[KeyT], submit: Callable[[KeyT], Reference]) -> None:
        """Poll workers, except workers that have not answered the last poll.

        Args:
            keys: The workers to poll.
            submit: Starts the remote call that polls the worker with the given key.
        """
        for key in keys:
            if key not in self._asked:
                self._asked[key] = submit(key), self._own_time.look()

    def poll(self) -> tuple[list[tuple[KeyT, Outcome]], list[tuple[KeyT, float]]]:
        """Check which workers have answered since the last check.

        Returns:
            Two lists. The first contains the workers that have answered, each with its outcome. The second contains the
            silent workers, each with its seconds of silence. The next `ask` polls all of these workers again.
        """
        now = self._own_time.look()
        answers, silent = list[tuple[KeyT, Outcome]](), list[tuple[KeyT, float]]()
        for key, (question, asked_at) in list(self._asked.items()):
            outcome = self._poll(key, question)
            if outcome.answered:
                answers.append((key, outcome))
            elif now - asked_at > self._heartbeat_s:
                silent.append((key, now - asked_at))
            else:
                continue
            del self._asked[key]
        self.rest()
        return answers, silent

    def rest(self) -> None:
        """Count the whole time since the last check as part of the workers' silence.

        In that time, this process was busy rather than stalled.
        """
        self._own_time.catch_up()

    def remove(self, key: KeyT) -> None:
        """Stop waiting for an answer from the worker `key`."""
        self._asked.pop(key, None)
