"""The monitor of the call that is running, and what it is used for while the driver waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from raysgd.engine.changes.call_monitor import CallMonitor
from raysgd.engine.changes.growth import Growth
from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.changes.step_hold import StepHold
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.replica import Capture

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_FIRST_ROUND_S = 0.2  # of a call: most are short, and what is known of them comes from the signs of life


class Monitoring:
    """Holds the monitor of one call after the other.

    Attributes:
        monitor: Watches the call that is running; None between calls.
        observer: Called about once a second while a call runs, and when one failed for good; if it is set.
    """

    def __init__(self, lifecycle: Lifecycle, growth: Growth) -> None:
        self._lifecycle, self._growth, self._snapshots = lifecycle, growth, lifecycle.snapshots
        self.monitor: CallMonitor | None = None
        self.observer: Callable[[], None] | None = None

    def begin(self) -> None:
        """Monitors the group while it changes, or waits."""
        self.monitor = CallMonitor(self._lifecycle, self._take_inside, at_round=self._at_round)

    def begin_call(self, call: Call) -> None:
        """Monitors a call; one that can be continued can be stopped at a step boundary."""
        hold = StepHold(self._lifecycle, self._growth) if call.resume is not None else None
        self.monitor = CallMonitor(
            self._lifecycle, self._take_inside, hold, self._at_round_of_call, _FIRST_ROUND_S, call.parted
        )
        self._growth.let_step_in()

    def renew(self) -> CallMonitor | None:
        """Monitors what follows the call: a loss, or a change of the ranks that were held for it.

        Returns:
            The monitor until now, which knows how far the ranks were.
        """
        before = self.monitor
        if before is not None:
            self.begin()
        return before

    def end(self) -> None:
        """Nothing runs any more."""
        self.monitor = None

    def poll(self) -> None:
        """Does what is due. To be called now and then while the driver waits."""
        if self.monitor is not None:
            self.monitor.poll()

    def _at_round(self) -> None:
        self._snapshots.poll()  # Ray brings a snapshot to this node only once somebody asks
        self.observe()

    def _at_round_of_call(self) -> None:
        self._growth.start_owed_spares()
        self._growth.let_step_in()
        self._at_round()

    def observe(self) -> None:
        """Tells the observer."""
        if self.observer is not None and not self._lifecycle.is_stopped:
            self.observer()

    def await_snapshot(self) -> None:
        """Waits until no snapshot is on its way any more, for whatever reason."""
        if self.monitor is None:
            self.begin()
        self._snapshots.poll()
        while self._snapshots.is_coming:
            self._snapshots.poll(timeout_s=_POLL_S)
            self.poll()

    def _take_inside(self, parts: Sequence[Capture]) -> bool:
        """Takes a snapshot from inside the running call; not while another one is on its way."""
        self._snapshots.poll()
        if self._snapshots.is_coming:
            return False
        self._lifecycle.take_parts(parts)
        return True


def tell_stuck(monitor: CallMonitor | None) -> None:
    """Logs what every rank is doing, so that you can find out why one of them holds the others up."""
    if monitor is not None:
        logger.warning("workers are not stopping:\n%s", monitor.report())
