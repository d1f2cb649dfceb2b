"""Gathers the workers' answers to calls and polls, and decides how long to wait for those that have not answered.

A live worker usually answers a poll at once, even while it runs a call. But a machine may stall for seconds, and the
answers of thousands of workers take seconds to arrive. A fixed timeout would therefore mistake live workers for dead
workers. Instead, the time without an answer is compared with how fast the other workers answer: see ADR 9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from statistics import median
from typing import ParamSpec

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.engine.platform import Platform, RemoteWorker, WorkerMethod
from raysgd.core.engine.shared.types import Failed, FailureKind, Outcome, Unanswered
from raysgd.exceptions import OnFailure

P = ParamSpec("P")

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


# How long to wait for further answers after a failure:
_DEATH_GRACE_S = 0.05  # after a death: simultaneous deaths are reported within this time
# After a lost connection: the cause is nearly always that a worker died, which Ray reports soon.
_CONNECTION_GRACE_S = 5.0
# After a lost connection, if the caller polls the survivors next: a short wait is enough, because the poll finds the
# dead rank before Ray reports that a node was lost. In that case, this is also the longest wait after a death.
_SHORT_CONNECTION_GRACE_S = 0.3
_USER_GRACE_S = 1.0  # after an exception in user code: ranks that wait for the failed rank in a collective never answer
# Upper limit of the wait after a long call, in which other ranks may raise the same exception later.
_LONGEST_USER_GRACE_S = 5.0
_POLL_S = 0.1
_LOOK_S = 0.005
_TICK_S = 0.001  # remaining times below this count as zero, because sums of seconds have rounding errors
_POLL_S_EACH = 0.0005  # pause per call between two polls: Ray takes a millisecond to poll a thousand calls


class Listener:
    """Gathers the workers' answers to a call.

    After a failure, decides how long to wait for ranks that have not answered.

    Args:
        references: Ray's references to the calls, by rank.
        asks_survivors: True if the caller polls the survivors afterwards. See `grace_s`.
        platform: Fetches the answers. Default: from Ray.
    """

    def __init__(
        self, references: Mapping[int, Reference], asks_survivors: bool = False, platform: Platform | None = None
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
        """Make `listen`, which runs in another thread, return soon.

        Called if the rank in the driver process has failed, or after Ctrl-C. Before `listen` returns, it waits the
        usual time for further answers.

        After this method ends, the callback `on_wait` of `listen` is not running and is never called again. The objects
        that the callback uses can then be closed. This holds even after one Ctrl-C during this method. A second Ctrl-C
        ends this method at once.

        Args:
            kinds: How the rank in the driver failed. Empty if it reported no failure.
        """
        self._kinds_of_driver |= set(kinds)
        self._is_stopped = True
        with OnFailure(self._await_on_wait):
            self._await_on_wait()

    def _await_on_wait(self) -> None:
        while self._is_in_on_wait:
            self._platform.sleep(_LOOK_S)

    def listen(self, on_wait: Callable[[], object] = lambda: None) -> dict[int, Outcome]:
        """Wait until all ranks have answered or the cause of a failure is clear. Return the outcomes by rank.

        Args:
            on_wait: Called regularly during the wait, until the first failure.
        """
        outcomes: dict[int, Outcome] = {rank: Unanswered(rank) for rank in self._references}
        waiting = {reference: rank for rank, reference in self._references.items()}
        pause_s = max(_POLL_S, _POLL_S_EACH * len(waiting))
        own_time = OwnTime(self._platform.now) if self._is_stopped else None  # since the first failure
        while waiting and (own_time is None or self.left_s(outcomes) >= _TICK_S):
            if own_time is not None:
                pause_s = min(self.left_s(outcomes), _POLL_S)
            done = self._platform.any_ready(list(waiting), pause_s)
            found = [self._platform.outcome(waiting[reference], reference) for reference in done]
            outcomes |= {outcome.rank: outcome for outcome in found}
            waiting = {reference: rank for reference, rank in waiting.items() if not outcomes[rank].answered}
            if own_time is not None:
                self._listened_s = own_time.look(pause_s)
                if found:
                    self._last_answer_s = self._listened_s
            elif self._is_stopped or any(isinstance(outcome, Failed) for outcome in found):
                self._failed_at, own_time = self._platform.now(), OwnTime(self._platform.now)
            elif not found:
                self._is_in_on_wait = True  # set before reading `_is_stopped`: `stop` sets that flag, then reads this
                try:
                    if not self._is_stopped:
                        on_wait()
                finally:
                    self._is_in_on_wait = False
        return outcomes

    def left_s(self, outcomes: Mapping[int, Outcome]) -> float:
        """Return how many more seconds to wait for ranks that have not answered.

        Args:
            outcomes: The outcomes of all ranks so far, including their failures.
        """
        kinds = self._kinds_of_driver | {outcome.failure.kind for outcome in outcomes.values() if outcome.failure}
        ran_s = self._failed_at - self._began
        return grace_s(kinds, self._asks_survivors, ran_s, self._last_answer_s) - self._listened_s


def grace_s(
    kinds: Set[FailureKind], asks_survivors: bool = False, ran_s: float = 0.0, last_answer_s: float = 0.0
) -> float:
    """Return for how many seconds after the first failure to wait for further answers.

    Args:
        kinds: The kinds of failure known so far.
        asks_survivors: True if the caller polls the survivors afterwards. That poll reveals which rank died, so the
            wait after a lost connection is shorter. After a death, the wait is longer while answers arrive.
        ran_s: Seconds from the start of the call to the first failure.
        last_answer_s: Seconds from the first failure to the last answer.
    """
    if "died" in kinds:  # waiting is worthwhile, because ranks that answer now need not be interrupted and polled later
        return min(last_answer_s + _DEATH_GRACE_S, _SHORT_CONNECTION_GRACE_S) if asks_survivors else _DEATH_GRACE_S
    if kinds and "user" not in kinds:
        return _SHORT_CONNECTION_GRACE_S if asks_survivors else _CONNECTION_GRACE_S
    return min(max(_USER_GRACE_S, ran_s), _LONGEST_USER_GRACE_S)


def roll_call(
    platform: Platform, references: Mapping[int, Reference], num_others: int, heartbeat_s: float
) -> dict[int, Outcome]:
    """Gather the answers to a poll, to find out which ranks are alive.

    Args:
        platform: Fetches the answers from Ray.
        references: Ray's references to the polling calls, by rank.
        num_others: Number of other ranks that are known to be alive.
        heartbeat_s: A worker without a heartbeat for this many seconds counts as lost.

    Returns:
        The outcomes by rank. A rank that did not answer in time has an outcome with `answered=False`.
    """
    outcomes: dict[int, Outcome] = {rank: Unanswered(rank) for rank in references}
    ranks = {reference: rank for rank, reference in references.items()}
    answered_after_s: list[float] = []
    waited_s, own_time = 0.0, OwnTime(platform.now)
    while ranks and waited_s < max_silence_s(answered_after_s, len(ranks), num_others, heartbeat_s):
        ready = platform.ready(ranks.keys(), _POLL_S)
        waited_s = own_time.look()
        polled = [platform.outcome(ranks.pop(reference), reference) for reference in ready]
        outcomes |= {outcome.rank: outcome for outcome in polled}
        answered_after_s += [waited_s for outcome in polled if outcome.ok]  # only live ranks show how fast answers come
    return outcomes


def outcomes_within(platform: Platform, calls: Mapping[int, Reference], timeout_s: float) -> dict[int, Outcome]:
    """Wait up to `timeout_s` until all of the given remote calls have ended. Return their outcomes by rank.

    Time during which this process was stalled does not count towards the timeout.

    Args:
        platform: Polls the calls.
        calls: Ray's references to the calls, by rank.
        timeout_s: Longest time to wait, in seconds.
    """
    own_time, references = OwnTime(platform.now), calls.values()
    while len(references) and len(platform.ready(references, _POLL_S)) < len(references):
        if own_time.look() >= timeout_s:
            break
    return {rank: platform.outcome(rank, call) for rank, call in calls.items()}


_ROUND_S = 1.0
# At least this many rounds of polls fit into `heartbeat_s`. With `heartbeat_s=30` and more than 1,000 ranks, polling
# therefore exceeds `_SHARE`.
_ROUNDS_PER_HEARTBEAT = 3
_QUESTION_S = 0.0005  # seconds of the driver's time for one poll and its answer
_SHARE = 0.05  # polling may take at most this fraction of the driver's time


class LivenessCheck:
    """Keeps track of polls that workers have not answered. Time in which this process was stalled does not count.

    Args:
        platform: Reads the answers.
        heartbeat_s: A worker that does not answer for this many seconds is silent.
    """

    def __init__(self, platform: Platform, heartbeat_s: float) -> None:
        self._platform, self._heartbeat_s, self._own_time = platform, heartbeat_s, OwnTime(platform.now)
        self._asked: dict[RemoteWorker, tuple[Reference, float]] = {}

    def round_s(self, num_workers: int, wanted_s: float = _ROUND_S) -> float:
        """Return the seconds between two rounds of polls: `wanted_s`, or more if there are many workers.

        At least three rounds fit into `heartbeat_s`.
        """
        return min(max(wanted_s, num_workers * _QUESTION_S / _SHARE), self._heartbeat_s / _ROUNDS_PER_HEARTBEAT)

    def ask(self, workers: Iterable[RemoteWorker], method: WorkerMethod[P], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of workers as a poll, except of workers that have not answered the last poll."""
        for worker in workers:
            if worker not in self._asked:
                self._asked[worker] = worker.submit(method, *args, **kwargs), self._own_time.look()

    def poll(self) -> tuple[dict[RemoteWorker, Outcome], dict[RemoteWorker, float]]:
        """Check which workers have answered since the last check.

        Returns:
            The outcomes of the workers that have answered, and the seconds of silence of the silent workers. The next
            `ask` polls all of these workers again.
        """
        now = self._own_time.look()
        answers, silent = dict[RemoteWorker, Outcome](), dict[RemoteWorker, float]()
        for worker, (question, asked_at) in list(self._asked.items()):
            outcome = self._platform.outcome(-1, question)
            if outcome.answered:
                answers[worker] = outcome
            elif now - asked_at > self._heartbeat_s:
                silent[worker] = now - asked_at
            else:
                continue
            del self._asked[worker]
        self.rest()
        return answers, silent

    def rest(self) -> None:
        """Count the whole time since the last check as part of the workers' silence.

        In that time, this process was busy rather than stalled.
        """
        self._own_time.look(float("inf"))
