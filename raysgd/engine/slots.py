"""The places that a group's workers, and those that wait to step in, have in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from raysgd.engine.resources import Reservation
from raysgd.engine.types import Resources


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
    """All that is reserved, and what of it is free."""

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

    def __len__(self) -> int:
        return sum(len(reservation) for reservation in self._reservations)

    @property
    def are_own(self) -> bool:
        """Whether what is reserved is held already, so that an actor finds its place at once."""
        return all(reservation.is_own for reservation in self._reservations)

    def reserve(
        self, count: int, timeout_s: float, *, has_driver: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        """Reserves room for `count` more workers, all or none.

        Raises:
            ReservationTimeoutError: The cluster did not grant it in time; nothing stays reserved.
        """
        reservation = self._make_reservation(
            self._need, count, has_driver, self._packs, self._within, self._when_not_granted
        )
        reservation.wait(timeout_s, check)
        self._reservations.append(reservation)
        self._free += [Slot(reservation, index) for index in range(count)]

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

    def give_back(self, slot: Slot) -> None:
        """Says that `slot` is free again."""
        self._free.append(slot)

    def close(self, timeout_s: float) -> None:
        """Gives everything back to the cluster."""
        reservations, self._reservations, self._free = self._reservations, [], []
        for reservation in reservations:
            reservation.close(timeout_s)
