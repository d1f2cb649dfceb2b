"""The places that a group's workers, and those that wait to step in, have in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from raysgd.engine.processes.resources import Reservation
from raysgd.engine.shared.types import Resources

_LOOK_S = 0.5
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Slot:
    """One bundle of a reservation: room for one worker."""

    reservation: Reservation
    index: int

    @property
    def options(self) -> dict[str, Any]:
        """Options that place an actor here."""
        return self.reservation.actor_options(self.index)


class Slots:
    """All that is reserved, what of it is free, and what was requested beside it."""

    def __init__(
        self,
        need: Resources,
        packs: bool = False,
        within: Any = "default",
        when_not_granted: str = "",
        make_reservation: Callable[..., Reservation] = Reservation,
    ) -> None:
        self._need, self._packs, self._within, self._when_not_granted = need, packs, within, when_not_granted
        self._make_reservation = make_reservation
        self._reservations: list[Reservation] = []
        self._free: list[Slot] = []
        self._asked: list[Reservation] = []

    def __len__(self) -> int:
        return sum(len(reservation) for reservation in self._reservations)

    @property
    def are_own(self) -> bool:
        """True if what is reserved is held already, so that an actor finds its place at once."""
        return all(reservation.is_own for reservation in self._reservations)

    def reserve(
        self, count: int, timeout_s: float, *, has_driver: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        """Reserves room for `count` more workers, all or none, instead of what was requested before.

        Raises:
            ReservationTimeoutError: The cluster did not grant it in time; nothing stays reserved.
        """
        self._ask_for(0)
        reservation = self._new(count, has_driver)
        reservation.wait(timeout_s, check)
        self._add(reservation)

    def ask_up_to(self, max_workers: int, num_workers: int) -> None:
        """Asks for the room that `num_workers` lack to become `max_workers`. An autoscaler starts nodes for it.

        Does not wait: `take_granted` takes what came.
        """
        self._ask_for(max_workers - max(num_workers, len(self)))  # there may be more than one for each worker

    def _ask_for(self, count: int) -> None:
        """Asks for room for `count` more workers, instead of what was requested before.

        Each is requested by itself, because one is of use without the others. Why: ADR 107.
        """
        while len(self._asked) > max(0, count):
            self._asked.pop().close(_CLOSE_S)
        for _ in range(count - len(self._asked)):
            reservation = self._new(1)
            if not reservation.is_own:  # inside a placement group there is no more to get
                return
            self._asked.append(reservation)

    def take_granted(self) -> None:
        """Takes what was requested and is there now."""
        for reservation in [each for each in self._asked if each.is_granted()]:
            self._asked.remove(reservation)
            self._add(reservation)

    def await_room(
        self, count: int, timeout_s: float, sleep: Callable[[float], object], *, has_driver: bool = False
    ) -> None:
        """Asks for room for `count` workers, and waits until it is there or the time is over.

        Nothing stays reserved: how many are started is decided by what is there then.
        """
        reservation, waited_s = self._new(count, has_driver), 0.0
        try:
            while waited_s < timeout_s and not (reservation.is_own and reservation.is_granted()):
                pause_s = min(_LOOK_S, timeout_s - waited_s)
                sleep(pause_s)
                waited_s += pause_s
        finally:
            reservation.close(_CLOSE_S)

    def _new(self, count: int, has_driver: bool = False) -> Reservation:
        return self._make_reservation(self._need, count, has_driver, self._packs, self._within, self._when_not_granted)

    def _add(self, reservation: Reservation) -> None:
        self._reservations.append(reservation)
        self._free += [Slot(reservation, index) for index in range(len(reservation))]

    def take_over(self, slots: Slots, taken: Collection[Slot]) -> None:
        """Takes over what another process has reserved, of which these slots are taken."""
        self._asked = slots._asked
        places = {(id(slot.reservation), slot.index) for slot in taken}
        for reservation in slots._reservations:
            self._add(reservation)
        self._free = [slot for slot in self._free if (id(slot.reservation), slot.index) not in places]

    def take(self) -> Slot:
        """A free slot, whatever became of its node; for a group that is just starting."""
        return self._free.pop(0)

    def take_usable(self, count: int, avoid: Collection[str] = ()) -> list[Slot]:
        """Up to `count` free slots on live nodes other than those to `avoid`."""
        nodes = {id(reservation): reservation.nodes() for reservation in self._reservations} if self._free else {}
        usable = []
        for slot in self._free:
            node = nodes[id(slot.reservation)][slot.index]
            if node is not None and node not in avoid:
                usable.append(slot)
        taken = usable[: max(0, count)]
        self._free = [slot for slot in self._free if slot not in taken]
        return taken

    def num_usable(self, avoid: Collection[str] = ()) -> int:
        """Return how many slots, taken or not, are on live nodes other than those to `avoid`."""
        nodes = [node for reservation in self._reservations for node in reservation.nodes()]
        return sum(node is not None and node not in avoid for node in nodes)

    def node_of(self, slot: Slot) -> str | None:
        """The node that `slot` is on now; None where it has none."""
        return slot.reservation.nodes()[slot.index]

    def give_back(self, slot: Slot) -> None:
        """Says that `slot` is free again."""
        self._free.append(slot)

    def close(self, timeout_s: float) -> None:
        """Gives everything back to the cluster, also where Ctrl-C ends the wait for a part of it."""
        reservations = [*self._reservations, *self._asked]
        self._reservations, self._asked, self._free = [], [], []
        with ExitStack() as closing:
            for reservation in reversed(reservations):
                closing.callback(reservation.close, timeout_s)
