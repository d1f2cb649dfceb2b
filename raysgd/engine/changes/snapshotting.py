"""The snapshots of a trainer: after which calls they are taken, and the one that somebody requests now.

Where they are kept: `SnapshotKeeper`. After which calls: `SnapshotPace`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.changes.monitoring import Monitoring
from raysgd.engine.processes.snapshots import NewestSnapshot, Snapshot
from raysgd.engine.shared import replica
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.snapshot_pace import SnapshotPace, SnapshotRule
from raysgd.engine.shared.types import GroupReport
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 4


class Snapshotting:
    """Takes snapshots after calls, and when somebody asks for one.

    Args:
        lifecycle: Holds the group.
        monitoring: Looks after the workers while the driver waits.
    """

    def __init__(self, lifecycle: Lifecycle, monitoring: Monitoring) -> None:
        self._lifecycle, self._monitoring, self._spec = lifecycle, monitoring, lifecycle.spec
        self._keeper = lifecycle.snapshots
        rule = SnapshotRule(self._spec.snapshot_every_s)
        self.pace = SnapshotPace(rule, lifecycle.now, self._spec.heartbeat_s)

    def is_due_after(self, call: Call) -> bool:
        """Return whether the workers are to copy their state after a call that is about to be made."""
        keeper = self._keeper
        if call.captures:
            return True
        if not (call.is_kept and self._spec.captures_after_calls) or keeper.is_coming:
            return False
        is_forced = keeper.must_follow or not call.is_repeatable or not keeper.has_any
        return is_forced or self.pace.is_due(call.function, keeper.replay_s, keeper.num_uncovered)

    def note(self, call: Call, report: GroupReport, seconds: float) -> None:
        """Notes that a call is completed, and takes the snapshot that came with the answers."""
        if call.is_kept:
            kept = call if self._spec.captures_after_calls else None
            self._keeper.completed(kept, seconds, is_repeatable=call.is_repeatable)
            self.pace.note_call(call.function, seconds)
        copies = [answer.capture for answer in report.values if answer.capture is not None]
        if copies:
            self._lifecycle.take_parts(copies)
            self.pace.note_copy(max(copy.seconds for copy in copies))

    def note_broken_off(self, call: Call) -> None:
        """Notes that a call ended half-way: ranks that were kept are in no state that a snapshot knows."""
        self._keeper.leave_call()
        if call.changes_state and self._lifecycle.group is not None:
            self._keeper.touch()
            if self._spec.loses_state:
                self._keeper.completed(None)

    @property
    def is_overdue(self) -> bool:
        """True if a snapshot should be taken right now, because repeating what is not covered would take too long."""
        is_kept = self._spec.captures_after_calls and not self._keeper.is_coming
        return is_kept and self.pace.rule.is_overdue(self._keeper.replay_s)

    def current(self, run: Callable[[Call], Any]) -> Snapshot:
        """The state as it is now, once the driver has it.

        Args:
            run: Runs a call.

        Raises:
            WorkersLostError: It was lost on its way again and again.
        """
        for _ in range(_NUM_ATTEMPTS):
            self._monitoring.await_snapshot()
            landed = self._keeper.landed
            if landed is not None and self._is_known:
                return landed
            run(copy_call())
        raise WorkersLostError(
            f"The state was lost on its way to the driver {_NUM_ATTEMPTS} times. The log above names the cause; "
            "too little memory in Ray's object store is a frequent one."
        )

    def newest(self, run: Callable[[Call], Any]) -> NewestSnapshot:
        """The state as it is now, once it is copied; its way to the driver is not waited for.

        Args:
            run: Runs a call.
        """
        self._keeper.poll()
        if not self._is_known:
            self._monitoring.await_snapshot()
            run(copy_call())
        return self._keeper.newest()

    @property
    def _is_known(self) -> bool:
        """True if the newest snapshot, if any, is the state as it is now, or all that is left of it."""
        return self._keeper.is_current or (self._keeper.landed is not None and self._is_all_there_is)

    @property
    def _is_all_there_is(self) -> bool:
        """True if no worker is left that could know more than the snapshot, and no completed call is to be made up for.

        New workers would start from it. So there is no need to wait for any, which may never come.
        """
        keeper = self._keeper
        is_whole = not keeper.calls_since and not keeper.has_gap
        return self._lifecycle.group is None and self._spec.captures and is_whole


def copy_call() -> Call:
    """A call that only lets the state be copied after it."""
    return Call(replica.nothing, captures=True)
