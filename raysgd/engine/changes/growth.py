"""Room for more workers, and standby workers that are started there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.engine.policies import capacity
from raysgd.engine.shared import replica
from raysgd.engine.shared.types import ClusterView
from raysgd.exceptions import ReservationTimeoutError

logger = logging.getLogger(__name__)

_RESERVATION_S = 1.0  # what the view calls free is granted at once, or another program took it


class Growth:
    """Looks for room beside the group of a lifecycle."""

    def __init__(self, lifecycle: Lifecycle, view: Callable[[], ClusterView]) -> None:
        self._lifecycle, self._view = lifecycle, view
        self._spec, self._scaling = lifecycle.spec, lifecycle.scaling
        self._owes_spares = False

    def find_room(self) -> int:
        """Return how many workers more a new group could have, with all that this one gives back; 0 when none."""
        group = self._lifecycle.running
        if len(group) >= self._scaling.max_workers:
            return 0
        group.slots.take_granted()
        avoid = self._lifecycle.nodes_to_avoid
        view = self._view().without(avoid)
        if not self._num_more(view, len(group.slots)):  # asks Ray nothing more, as long as there is no room
            return 0
        return self._num_more(view, group.slots.num_usable(avoid))

    def _num_more(self, view: ClusterView, num_slots: int) -> int:
        group = self._lifecycle.running
        return self._scaling.grow(view, self._spec.resources, len(group), num_slots)

    def start_standby(self) -> None:
        """Begins to start the workers that the group lacks, as far as there is room; does not wait for them."""
        group, most = self._lifecycle.running, self._scaling.max_workers
        group.slots.take_granted()
        missing = most - len(group) - group.standby.num_coming - group.standby.num_ready
        if missing <= 0:
            return
        missing -= group.standby.start(missing, most, self._lifecycle.nodes_to_avoid)
        num_free = min(missing, capacity(self._view(), self._spec.resources))
        if num_free > 0:
            self._start_in_free_room(num_free)
        group.slots.ask_up_to(most, len(group))

    def _start_in_free_room(self, count: int) -> None:
        group = self._lifecycle.running
        try:
            group.slots.reserve(count, _RESERVATION_S)
        except ReservationTimeoutError:
            logger.info("another program took the resources for %s more workers", count)
            return
        group.standby.start(count, self._scaling.max_workers, self._lifecycle.nodes_to_avoid)

    def let_step_in(self) -> None:
        """Holds replicas that run on by themselves, wherever they are, as soon as others can join them."""
        group = self._lifecycle.group
        if not self._spec.runs_on or group is None or len(group) >= self._scaling.max_workers:
            return
        if group.standby.num_ready and self.admits_others():
            group.ask_beside("beside", replica.hold)

    def admits_others(self) -> bool:
        """Return whether all replicas would let others join where they are. Asks them, beside their work."""
        group = self._lifecycle.running
        reports = group.ask_beside("beside", replica.replica_progress)
        return len(reports) == len(group) and all(each.admits and not each.obstacle for each in reports.values())

    def start_spares(self) -> None:
        """Begins to start as many workers as are to wait as spares, and were used up or lost."""
        self._owes_spares = False
        group = self._lifecycle.group
        if group is None or not self._spec.num_spares:
            return
        missing = self._spec.num_spares - group.standby.num_coming - group.standby.num_ready
        if missing > 0:
            group.standby.start(missing, len(group), self._lifecycle.nodes_to_avoid)

    def owe_spares(self) -> None:
        """Notes that spares may be missing. A new process takes the time of the others' cores, so it comes later."""
        self._owes_spares = True

    def start_owed_spares(self) -> None:
        """Does what `start_spares` does, once for each time that spares may have been used up."""
        if self._owes_spares:
            self.start_spares()
