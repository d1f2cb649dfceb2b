"""The actions of a front end when a group starts and ends."""

from __future__ import annotations

from raysgd.engine.decisions.failures import Diagnosis
from raysgd.engine.group.worker_group import WorkerGroup
from raysgd.engine.shared.types import GroupReport


class GroupHooks:
    """Watches the groups of a trainer; by itself it does nothing. The lifecycle calls it, in the driver.

    A hook may use the group that it is given. It must not call the controller, which is waiting for it.
    """

    def on_start(self, group: WorkerGroup) -> GroupReport | None:
        """The workers run and are connected; nothing was run on them yet.

        Returns:
            The report of a call over which a worker died: the start counts as failed then. None if all is well.
        """
        return None

    def on_change(self, group: WorkerGroup) -> None:
        """The group has other members or other ranks than before; those that stayed go on where they are."""

    def on_failure(self, diagnosis: Diagnosis) -> None:
        """A call failed, and is about to run again on new workers."""

    def on_stop(self, group: WorkerGroup) -> None:
        """The workers are about to be stopped in an orderly way. Follows `on_end`."""

    def on_end(self, group: WorkerGroup) -> None:
        """The workers are about to end, in whatever way; also from another thread, and more than once for a group."""
