"""Copies of the state of one replica, taken after a call or between two steps of one, and handed to the driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysgd.engine.shared.replica import Capture
from raysgd.worker.data.epoch_run import EpochRun
from raysgd.worker.ledger import Ledger
from raysgd.worker.state.copies import MidCallSnapshots, PendingCopies, StateCopy
from raysgd.worker.state.replica_state import ReplicaState


class StateCopies:
    """Takes the copies, and keeps them until the driver has fetched them.

    Args:
        snapshot_every_n_steps: How often to copy the state inside a training call.
        ledger: Where the time that copies take is booked.

    Attributes:
        inside: Those taken inside a training call.
    """

    def __init__(self, snapshot_every_n_steps: int | None, ledger: Ledger) -> None:
        self._pending = PendingCopies()
        self.inside = MidCallSnapshots(snapshot_every_n_steps)
        self._ledger = ledger
        self._usual_s: float | None = None

    def after_call(self, state: ReplicaState, rank: int, landed_token: int | None) -> Capture:
        """Copies the state once, between two calls; the driver has that of `landed_token` by now.

        A large copy is made when the driver fetches it, or by `finish`; but for the first one, which says how long they
        take.
        """
        with self._ledger.copying():
            self._pending.drop_landed(landed_token)
            copy = state.copy_for_driver(rank)
            if copy is not None and self._usual_s is None:
                self._made(copy)
            part = self._pending.claimed(self._with(copy, Capture(state.own())))
            return part if copy is None or copy.is_made else replace(part, seconds=self._usual_s or 0.0)

    def inside_call(self, state: ReplicaState, rank: int, run: EpochRun) -> Capture:
        """The same inside a call, and at once; a copy that was not fetched gives way to this one."""
        with self._ledger.copying():
            self._pending.drop_unclaimed()
            copy = state.copy_for_driver(rank)
            if copy is not None:
                self._made(copy)
            return self._with(copy, Capture(state.own(), progress=run.state(with_metrics=True)))

    def _with(self, copy: StateCopy | None, part: Capture) -> Capture:
        return part if copy is None else self._pending.add(part, copy)

    def _made(self, copy: StateCopy) -> Any:
        content = copy.made()
        self._usual_s = copy.seconds
        return content

    def finish(self) -> None:
        """Makes what is still to be copied: the state is about to change."""
        unmade = self._pending.unmade()
        if unmade:
            with self._ledger.copying():
                for copy in unmade:
                    self._made(copy)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """This rank's part of the snapshot taken after `number` steps of the call, if it is still kept."""
        part = self.inside.part(number)
        if part is not None and part.token is not None and not self._pending.claim(part.token):
            return None
        return part

    def fetch(self, token: int) -> Any:
        """The copy that `token` names."""
        return self._made(self._pending.fetch(token))

    def clear(self) -> None:
        """Drops everything."""
        self.inside.clear()
        self._pending.clear()
