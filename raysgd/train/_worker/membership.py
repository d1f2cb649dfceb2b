"""A training function's membership in its worker group, which may change while the function runs.

Two threads use a `Membership`. One runs the function, which takes steps together with the other ranks. The other serves
the driver: it leaves a broken group, waits until the function's collectives in that group have failed, and joins the
next group. The function waits before its next batch until the next group is complete.

ADR 121 explains why a function can continue in place, and what makes a step count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from raysgd.core.engine.shared.types import World
from raysgd.exceptions import OnFailure
from raysgd.train._worker.messages import Mailbox, RanksMet

_BREAKS_IN_S = 60.0  # how long a collective may take to fail once its connections are closed
# First, `Membership.leave` waits until the collectives that run through this module have failed. It then waits at most
# this long for the function to wait in this module, to wait for the driver, or to end. Meanwhile, collectives that user
# code calls directly fail, too. The time may be too short for a function that is busy between two passes.
_REST_S = 0.2
_FIRST_BATCH_S = 120.0  # how long a new worker's function may take from getting its rank to its first batch
_LOOK_S = 0.05


@dataclass(frozen=True, eq=False)
class GroupPlace:
    """A training function's rank in one of its worker groups, with the number of that group.

    Attributes:
        number: Number of earlier groups since the function started, equal on all ranks.
        world: The rank and the number of ranks.
    """

    number: int
    world: World


@dataclass(frozen=True)
class BatchStart:
    """A training function's progress at the start of a batch, for a comparison at the end of the batch."""

    num_done: int
    num_failed: int


class Membership:
    """Decides whether a function's optimizer steps count, and blocks the function between batches while a group forms.

    A step counts if all ranks have its averaged gradients. Otherwise its batch is repeated. Before a rank steps, it
    reports that it has the gradients, and waits until all ranks have reported. If the group breaks in the meantime,
    some ranks may have stepped, but only if all ranks have the gradients. In this case, the other survivors take the
    step, too. So either all survivors take the step, or no survivor does.

    A function steps in if its worker joins a group that is already training, usually to replace a lost worker. Such a
    function runs alone until it requests its rank. It gets the rank when its worker joins a group. At its first batch,
    it meets the other ranks: it loads their state.

    Args:
        world: The function's first rank and group size.
        mailbox: Tells the driver that the group is broken, at most once per group, and that all ranks of a group have
            the same state: from then on, all of them send reports.
        is_new: True if the function will step into a running group.

    Attributes:
        place: The current group, and the function's rank in it.
        num_done: Number of steps that counted.
        is_usable: True if this rank is in a group, and the group is not known to be broken.
        has_failed: True if the current batch has failed and will be repeated. Also True in a new worker before its
            first batch.
        flaw: Reason why the function can never continue in another group; None if there is no such reason.
        is_new: In a new worker, True until the function has loaded the other ranks' state.
        admits: True if functions that step in later can catch up with this function.
        is_at_first_batch: True if the function of a new worker has reached its first batch, where it gets the other
            ranks' state.
    """

    def __init__(self, world: World, mailbox: Mailbox, is_new: bool = False) -> None:
        self.place = GroupPlace(0, world)
        self.num_done = 0
        self.has_failed = self.is_new = is_new
        self.admits = False
        self.flaw: str | None = None
        self._mailbox = mailbox
        self._changed = threading.Condition()
        self._next: World | None = None
        self._batch: GroupPlace | None = None
        self._num_failed = 0
        self.is_usable = self._is_placed = not is_new
        self.is_at_first_batch = False
        self._num_in_use = 0
        self._is_waiting = False
        self._is_agreeing = False
        self._verdict: bool | None = None

    # ------------------------------------------------------------------------------------------------- the function

    def enter(self) -> GroupPlace:
        """Wait until this worker is in a group that is not known to be broken. Return the function's `GroupPlace`."""
        with self._changed:
            self.is_at_first_batch = True
            self._wait_until(lambda: self.is_usable)
            return self.place

    def await_place(self) -> None:
        """In a new worker, block the function until the worker has a rank in a group."""
        with self._changed:
            if not self._is_placed:
                self._wait_until(lambda: self._is_placed)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        self._is_waiting = True
        self._changed.notify_all()
        self._changed.wait_for(is_so)
        self._is_waiting = False

    def open_batch(self, place: GroupPlace, has_trained: bool) -> BatchStart:
        """Record that the function starts a batch whose samples were divided among the ranks of a group.

        After each change of the group, one batch fails on every survivor, even on a survivor that was between two
        batches. This keeps the number of failed batches equal on all ranks.

        Args:
            place: The group, and the rank in it.
            has_trained: True if steps were taken on earlier batches of this loader. Otherwise, the batch does not fail
                here.

        Returns:
            The function's progress, for a comparison at the end of the batch.
        """
        with self._changed:
            start = BatchStart(self.num_done, self._num_failed)
            self._batch = place
            self.has_failed = has_trained and self._num_failed < place.number
            self._num_failed += self.has_failed
            return start

    def has_repeated(self, mark: BatchStart) -> bool:
        """Return True if a batch has failed.

        Args:
            mark: The result of `open_batch` for the batch.
        """
        return self._num_failed != mark.num_failed

    def begin_exchange(self) -> bool:
        """Return True if the function may communicate with other ranks for its current batch.

        If True is returned, call `end_exchange` after the communication. If False is returned, the batch has failed.
        """
        with self._changed:
            if self.has_failed or not self.is_usable or self._batch is not self.place:
                self.fail()
                return False
            self._num_in_use += 1
            return True

    def end_exchange(self, broken: BaseException | None = None) -> None:
        """Record that the communication for which `begin_exchange` returned True has ended.

        Args:
            broken: The error with which the group broke during the communication; None if the group is not broken.
        """
        with self._changed:
            self._num_in_use -= 1
            if broken is not None:
                self.note_broken(broken)
                self.fail()
            self._changed.notify_all()

    def count_step(self, agree: Callable[[], BaseException | None]) -> bool:
        """Return True if the current step counts. Called when this rank has the averaged gradients.

        If the group breaks meanwhile, wait until `join` decides whether the step counts.

        Args:
            agree: Function that waits until all ranks have called it and returns None. If the group breaks, it returns
                the exception.
        """
        if not self.begin_exchange():
            return False
        with self._changed:
            self._is_agreeing, self._verdict = True, None

        def give_up() -> None:
            with self._changed:
                self._is_agreeing = False
            self.end_exchange()

        with OnFailure(give_up):
            broken = agree()
        with self._changed:
            self._num_in_use -= 1
            if broken is None:
                self._is_agreeing = False
                self.num_done += 1
                self._changed.notify_all()
                return True
            self.note_broken(broken)
            self._wait_until(lambda: self._verdict is not None)
            return bool(self._verdict)

    def meet(self, place: GroupPlace, exchange: Callable[[], BaseException | None]) -> bool:
        """Give all ranks of a new group the same state. Return False if the group is broken.

        Args:
            place: The group, and the rank in it.
            exchange: Function that sends the state to new ranks and returns None. If the group breaks, it returns the
                exception.
        """
        with self._changed:
            if not self.is_usable or place is not self.place:
                return False
            self._num_in_use += 1
        broken: BaseException | None = None
        try:
            broken = exchange()
            number = self.place.number  # read before `end_exchange`, after which the group may change
        finally:
            self.end_exchange(broken)
        if broken is None:
            self._mailbox.post(RanksMet(number))
        return broken is None

    def step_in(self, number: int, num_done: int) -> None:
        """In a new worker, continue from the other ranks' progress. Called during `meet`.

        Args:
            number: Number of the other ranks' current group.
            num_done: Number of the other ranks' steps that counted.
        """
        with self._changed:
            self.place, self.num_done = GroupPlace(number, self.place.world), num_done
            self._num_failed, self.is_new = number, False

    def fail(self) -> None:
        """Mark the current batch as failed."""
        with self._changed:
            self._num_failed += not self.has_failed
            self.has_failed = True

    # --------------------------------------------------------------------------------------------------- the driver

    @property
    def obstacle(self) -> str | None:
        """Reason why the function cannot continue in another group now; None if it can."""
        return self.flaw or (None if self.num_done or self.is_new else "the function has not taken a step yet")

    def await_rest(self) -> None:
        """In a standby worker, wait until the function requests its rank, waits for the driver, or ends."""
        self._look_until(lambda: self._is_waiting)

    def _look_until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not is_so() and not self._mailbox.is_held and (deadline is None or time.monotonic() < deadline):
                self._changed.wait(_LOOK_S)

    def note_broken(self, error: BaseException) -> None:
        """Mark the group as broken, even if no collective of the function has failed yet."""
        with self._changed:
            if self.is_usable:
                self.is_usable = False
                self._mailbox.break_off(error)

    def leave(self) -> None:
        """Keep the function from using its group, and wait until its collectives in the group have failed.

        The connections of the group are already closed.

        Raises:
            TimeoutError: A collective does not end in time.
        """
        with self._changed:
            self.is_usable = False
            if not self._changed.wait_for(lambda: not self._num_in_use, _BREAKS_IN_S):
                raise TimeoutError(f"an exchange with other ranks has not ended within {_BREAKS_IN_S:g} s")
            self._changed.wait_for(lambda: self._is_waiting or self._mailbox.is_held, _REST_S)

    def join(self, world: World, is_behind: bool) -> None:
        """Record this worker's rank in another group that its process has joined.

        The function enters the group when all ranks have joined and `go_on` is called. In a new worker, also wait until
        the function reaches its first batch, at most `_FIRST_BATCH_S` seconds.

        Args:
            world: The rank in that group and the group's size.
            is_behind: True if another rank has taken one more step than this rank. The step then counts here, too.

        Raises:
            RuntimeError: This rank does not have the gradients of that step.
        """
        with self._changed:
            if is_behind and not self._is_agreeing and not self.is_new:
                raise RuntimeError("another rank took a step whose gradients this rank does not have")
            if self._is_agreeing:
                self._is_agreeing, self._verdict = False, is_behind
                self.num_done += is_behind
                if not is_behind:
                    self.fail()
            self._next = world
            if self.is_new:
                self.place, self._is_placed = GroupPlace(self.place.number, world), True
            self._changed.notify_all()
        if self.is_new:
            self._look_until(lambda: self.is_at_first_batch, _FIRST_BATCH_S)

    def go_on(self) -> None:
        """Let the function enter the group of the last `join`, because all its ranks have joined.

        Further calls do nothing until the next `join`.
        """
        with self._changed:
            if self._next is None:
                return
            self.place, self._next = GroupPlace(self.place.number + 1, self._next), None
            self.is_usable = True
            self._changed.notify_all()
