"""Adds up the times that replicas report, to show how each rank has spent its time since the trainer's start.

A rank outlives its process: if the process is lost, another process takes over the rank. The time that the lost process
reported stays in the rank's account. The time without a process counts as recovery if a training call waited for the
rank.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.numbers import timing
from raysgd.core.text.log_lines import Once, named

_WARN_ABOVE = 0.2
_WARN_AFTER_S = 60.0
_ADVICE = {
    "waiting for data": "load with more processes (`num_workers` of the loader), or do less for each sample",
    "exchanging gradients": "make the batches larger, or accumulate gradients over several",
    "waiting for a slower rank": "`trainer.status()` names the rank; give all ranks alike machines and data",
    "copying snapshots": "copy less often: a larger `snapshot_every_n_steps`",
    "copying to undo a batch": "`Recovery(undo=False)` copies nothing, and restarts from the snapshot instead",
    "recovering from failures": "`spare_workers=1` shortens recoveries",
}

logger = logging.getLogger(__name__)


@dataclass
class _Account:
    """The record of how one rank has spent its time.

    Attributes:
        since: When the rank first existed, on the driver's clock.
        seconds: Seconds by bin (category of time).
        newest: The last report of the rank's current process.
        waited_in: The bin for the time until the current process took over the rank.
    """

    since: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(timing.BINS, 0.0))
    newest: timing.TimeSpent | None = None
    waited_in: str = timing.START_UP

    @property
    def told_until(self) -> float:
        return self.since + sum(self.seconds.values())

    def move(self, source: str, target: str, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


class Accounts:
    """Adds up the times that replicas report. Keeps an account for each rank: its seconds by bin (category of time).

    Args:
        clock: Returns the time in seconds. Only differences are used.
        used: Names of options that the user has already set, so that `warn` does not recommend them.

    Examples:
        >>> clock = iter([0.0, 5.0]).__next__
        >>> accounts = Accounts(clock)
        >>> accounts.note_times({0: Heartbeat(time=timing.TimeSpent("a", {"useful": 3.0}))})
        >>> dict(accounts.ledger().total())
        {'useful': 3.0, 'start_up': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, used: Collection[str] = ()) -> None:
        self._clock, self._used = clock, used
        self._began = clock()
        self._accounts: dict[int, _Account] = {}
        self._known: dict[str, timing.TimeSpent] = {}
        self._has_trained = False
        self._call = math.inf, math.inf  # when the last training call started and ended
        self._waited_s = 0.0
        self._once = Once()
        self._lock = threading.Lock()  # `status` may be called from any thread

    def begin_call(self) -> None:
        """Record that a training call has started."""
        self._has_trained, self._call = True, (self._clock(), math.inf)

    def end_call(self) -> None:
        """Record that a training call has ended.

        Call this method after the ranks have reported their times in that call.
        """
        self._call = self._call[0], self._clock()

    @contextmanager
    def waiting_for_validation(self) -> Iterator[None]:
        """Count the duration of the `with` block as time spent waiting for a validation on another worker."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - began

    def kept(self) -> Any:
        """Return the contents of all accounts, to pass to `take_over` in another process."""
        with self._lock:
            now = time.time(), self._clock()
            return *now, dict(self._accounts), dict(self._known), self._waited_s, self._has_trained

    def take_over(self, kept: Any) -> None:
        """Continue the accounts of another process. Its clock may differ from the clock of this process.

        Args:
            kept: The result of `kept` in that process.
        """
        at, read, self._accounts, self._known, self._waited_s, self._has_trained = kept
        later_s = self._clock() - read - (time.time() - at)
        for account in self._accounts.values():
            account.since += later_s

    def in_calls(self) -> dict[int, float]:
        """Return the seconds in training calls that each rank has reported, by rank."""
        with self._lock:
            return {rank: timing.seconds_in_calls(account.seconds) for rank, account in self._accounts.items()}

    def note_times(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """Record the times that the ranks' heartbeats report. Ignore heartbeats that report no times."""
        with self._lock:
            now = self._clock()
            for rank, heartbeat in heartbeats.items():
                if heartbeat.time is not None:
                    self._note(rank, heartbeat.time, now)
            # Store the new reports only after the accounts of all ranks are updated. Two ranks may have swapped their
            # processes, so updating either account needs the other process's previous report.
            for heartbeat in heartbeats.values():
                spent = heartbeat.time
                before = None if spent is None else self._known.get(spent.of)
                if spent is not None and (before is None or spent.total_s > before.total_s):
                    self._known[spent.of] = spent

    def _note(self, rank: int, spent: timing.TimeSpent, now: float) -> None:
        account = self._accounts.get(rank)
        if account is None:
            account = self._accounts[rank] = _Account(now - spent.total_s if self._known else self._began)
        before = self._known.get(spent.of)
        if before is not None and spent.total_s <= before.total_s:
            return  # ignore an outdated report
        if account.newest is None or account.newest.of != spent.of:
            self._change_hands(account, spent, before, now)
        for name in timing.BINS:
            account.seconds[name] += spent.seconds.get(name, 0.0) - (before.seconds.get(name, 0.0) if before else 0.0)
        account.newest = spent
        # Positive if a process's first report was late. Some time was then counted twice.
        late_s = account.told_until - now
        for name in (account.waited_in, timing.DRIVER) if late_s > 0 else ():
            taken = min(late_s, account.seconds[name])
            account.seconds[name] -= taken
            late_s -= taken

    def _change_hands(
        self, account: _Account, spent: timing.TimeSpent, before: timing.TimeSpent | None, now: float
    ) -> None:
        """Record that a new process, possibly the first, has taken over a rank.

        Add the time during which the rank had no process. If the new process repeats steps, move the time of the lost
        steps to the bin for repeated steps.

        Args:
            account: The rank's account.
            spent: The new process's first report for this rank.
            before: The new process's last report for the rank that it had before. None if it had no other rank.
            now: The current time, on the driver's clock.
        """
        last = account.newest
        if last is not None and not spent.is_successor and before is None:  # the new process continues from a snapshot
            account.move(timing.USEFUL, timing.AGAIN, min(last.unsaved_s, account.seconds[timing.USEFUL]))
        own_s = spent.total_s - (before.total_s if before is not None else 0.0)
        since, until = account.told_until, max(account.told_until, now - own_s)
        in_call_s = max(0.0, min(until, self._call[1]) - max(since, self._call[0]))
        # Between calls, nothing waits for a rank, so only the time in a call counts as waiting.
        waited_s = until - since if last is None else in_call_s
        account.waited_in = timing.START_UP if last is None else timing.REPLACE
        account.seconds[account.waited_in] += waited_s
        account.seconds[timing.DRIVER] += until - since - waited_s

    def ledger(self, num_ranks: int | None = None) -> timing.TimeLedger:
        """Return how each rank has spent its time. Ranks that no longer exist are included.

        Args:
            num_ranks: Number of ranks in the current group. The ledger mentions ranks that have not reported yet. None
                if the trainer was shut down, which the ledger then says.
        """
        ranks = {rank: dict(account.seconds) for rank, account in sorted(self._accounts.items())}
        # While the driver waits for a validation, the ranks report time between calls. Move this time to its own bin.
        for seconds in ranks.values():
            waited_s = min(self._waited_s, seconds[timing.DRIVER])
            seconds[timing.DRIVER] -= waited_s
            seconds[timing.VALIDATION_WAIT] += waited_s
        return timing.TimeLedger(ranks, tuple(self._notes(num_ranks)))

    def _notes(self, num_ranks: int | None) -> list[str]:
        notes = []
        if num_ranks is None:
            notes.append("the trainer was shut down, the ledger ends there")
        if not self._has_trained:
            notes.append("no training call was made yet")
        silent = [rank for rank in range(num_ranks or 0) if rank not in self._accounts]
        if silent:
            notes.append(f"{named(silent)} {'has' if len(silent) == 1 else 'have'} not answered yet")
        accounts = self._accounts.values()
        if (
            self._has_trained
            and len(accounts) > 1
            and not any(account.seconds[timing.EXCHANGE] for account in accounts)
        ):
            notes.append("exchanges cannot be told from useful steps here")
        return notes

    def warn(self) -> None:
        """Log a warning with advice if one avoidable activity takes much of the time in training calls.

        Warn only once, and not before the ranks have spent a minute in training calls.
        """
        ledger = self.ledger()
        largest = ledger.largest_avoidable()
        if largest is None or largest[1] <= _WARN_ABOVE or ledger.training_s < _WARN_AFTER_S * len(ledger.ranks):
            return
        words, share = largest
        if self._once.is_first("largest bin"):
            advice = _ADVICE[words]
            logger.warning(
                "%.0f %% of the time in training calls goes into %s.%s `print(trainer.ledger())` shows all shares",
                100 * share,
                words,
                "" if any(option in advice for option in self._used) else f" Try this: {advice}.",
            )
