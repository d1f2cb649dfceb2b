"""The place of a running function in a group that survivors of a failure form again, beneath it.

Two threads meet here: the function, which takes steps together with the others, and the one that the driver calls,
which leaves a broken group and joins the next one. Neither waits for the other longer than an exchange takes to break.

Why a function can go on in place, and how it is decided whether a step counts: ADR 121.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from raysgd.engine.shared.types import World
from raysgd.exceptions import OnFailure

_BREAKS_IN_S = 60.0  # an exchange whose connections were ended
# So long for the function to come to a place where it waits. There it has to go in any case, unless it does something
# else between two passes. An exchange that user code makes, and that is not known here, ends meanwhile.
_REST_S = 0.2
_FIRST_BATCH_S = 120.0  # so long may a function take from its first question for its place to its first batch
_LOOK_S = 0.05


@dataclass(frozen=True, eq=False)
class GroupPlace:
    """A place in one of the groups that the function has been in.

    Attributes:
        number: How many groups there were before, since the function began: alike on all ranks.
        world: The place among the ranks.
    """

    number: int
    world: World


@dataclass(frozen=True)
class BatchStart:
    """The progress of the function when a batch began."""

    num_done: int
    num_failed: int
    has_failed: bool


class Membership:
    """Decides which steps of a function count, and holds it between two batches while the group is formed again.

    A step counts where all ranks hold its gradients. Each says so before it steps, and steps when all have. Where the
    group breaks over that, none has stepped unless all hold them: so either all survivors step, or none does.

    A function that steps in later runs alone until it asks for its place. It is given one with a group; behind its way
    to its first batch it meets the others, and takes over what they have.

    Args:
        world: The place that the function begins at.
        tell: Tells the driver, once for each group, that it is broken.
        is_held: Asks whether the function waits for something else than for other ranks, or is over.
        is_new: Whether the function is to step in where others are in the middle.
        note: Called, with the number of the place, when the ranks of another group have met: all report from here on.

    Attributes:
        place: The present place.
        num_done: The steps that counted.
        has_failed: Whether the batch that the function is in has failed, and will be repeated.
        flaw: Why the function cannot go on in another group at all; None where it can.
        is_new: Whether it has not met the others yet.
        admits: Whether functions that step in later would go on as this one does.
    """

    def __init__(
        self,
        world: World,
        tell: Callable[[BaseException], None],
        is_held: Callable[[], bool] = lambda: False,
        is_new: bool = False,
        note: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.place = GroupPlace(0, world)
        self.num_done = 0
        self.has_failed = self.is_new = is_new
        self.admits = False
        self.flaw: str | None = None
        self._tell, self._is_held, self._note = tell, is_held, note
        self._changed = threading.Condition()
        self._next: World | None = None
        self._batch: GroupPlace | None = None
        self._num_failed = 0
        self._is_open, self._is_broken = not is_new, False
        self._is_placed, self._has_entered = not is_new, False
        self._num_in_use = 0
        self._is_waiting = False
        self._is_agreeing = False
        self._verdict: bool | None = None

    # ------------------------------------------------------------------------------------------------- the function

    def enter(self) -> GroupPlace:
        """Wait until there is a group that is not known to be broken; return the place in it."""
        with self._changed:
            self._has_entered = True
            self._wait_until(lambda: self._is_open and not self._is_broken)
            return self.place

    def await_place(self) -> None:
        """Wait, in a function that is to step in, until it has a place."""
        with self._changed:
            if not self._is_placed:
                self._wait_until(lambda: self._is_placed)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        self._is_waiting = True
        self._changed.notify_all()
        self._changed.wait_for(is_so)
        self._is_waiting = False

    def open_batch(self, place: GroupPlace, has_trained: bool) -> BatchStart:
        """A batch begins that was divided for a place.

        With each new group one batch fails on every survivor, also on those that were between two batches: so all
        functions count alike.

        Args:
            place: The place.
            has_trained: Whether steps were taken on batches of this loader before.
        """
        with self._changed:
            self._batch = place
            self.has_failed = has_trained and self._num_failed < place.number
            self._num_failed += self.has_failed
            return BatchStart(self.num_done, self._num_failed, self.has_failed)

    def has_repeated(self, mark: BatchStart) -> bool:
        """Return whether the batch that began at this mark failed."""
        return mark.has_failed or self._num_failed != mark.num_failed

    def begin_exchange(self) -> bool:
        """Return whether the batch may exchange something. Then `end_exchange` has to follow."""
        with self._changed:
            is_usable = self._is_open and not self._is_broken and self._batch is self.place
            if self.has_failed or not is_usable:
                self._fail()
                return False
            self._num_in_use += 1
            return True

    def end_exchange(self, broken: BaseException | None = None) -> None:
        """An exchange has ended; `broken` says that the group is."""
        with self._changed:
            self._num_in_use -= 1
            if broken is not None:
                self._break(broken)
                self._fail()
            self._changed.notify_all()

    def count_step(self, agree: Callable[[], BaseException | None]) -> bool:
        """Return whether a step counts whose gradients are here.

        Args:
            agree: Returns when all ranks have called it; or the exception with which the group broke.
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
            self._break(broken)
            self._wait_until(lambda: self._verdict is not None)
            return bool(self._verdict)

    def meet(self, place: GroupPlace, exchange: Callable[[], BaseException | None]) -> bool:
        """Let the ranks of another group meet; return False where it is broken.

        Args:
            place: The place in it.
            exchange: Returns when all have met; or the exception with which the group broke.
        """
        with self._changed:
            if not self.is_usable or place is not self.place:
                return False
            self._num_in_use += 1
        broken: BaseException | None = None
        try:
            broken = exchange()
        finally:
            with self._changed:
                self._num_in_use -= 1
                number = self.place.number
                if broken is not None:
                    self._break(broken)
                self._changed.notify_all()
        if broken is None:
            self._note(number)
        return broken is None

    def step_in(self, number: int, num_done: int) -> None:
        """Take over, in `meet`, how far the others are.

        Args:
            number: That of their place.
            num_done: Their steps that counted.
        """
        with self._changed:
            self.place, self.num_done = GroupPlace(number, self.place.world), num_done
            self._num_failed, self.is_new = number, False

    def fail(self) -> None:
        """The batch has failed, before its first exchange."""
        with self._changed:
            self._fail()

    def _fail(self) -> None:
        self._num_failed += not self.has_failed
        self.has_failed = True

    def _break(self, error: BaseException) -> None:
        if self._is_open and not self._is_broken:
            self._is_broken = True
            self._tell(error)

    # --------------------------------------------------------------------------------------------------- the driver

    @property
    def obstacle(self) -> str | None:
        """The reason why the function cannot go on in another group now; None where it can."""
        return self.flaw or (None if self.num_done or self.is_new else "the function has not taken a step yet")

    @property
    def is_at_first_batch(self) -> bool:
        """True if a function that is to step in has come to where it meets the others."""
        return self._has_entered

    def await_rest(self) -> None:
        """Wait until a function that is to step in asks for its place, or is over."""
        self._look_until(lambda: self._is_waiting)

    def _look_until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not is_so() and not self._is_held() and (deadline is None or time.monotonic() < deadline):
                self._changed.wait(_LOOK_S)

    @property
    def is_usable(self) -> bool:
        """True if this rank is in a group that is not known to be broken."""
        return self._is_open and not self._is_broken

    def note_broken(self, error: BaseException) -> None:
        """The group is broken, whether or not the function has seen that."""
        with self._changed:
            self._break(error)

    def leave(self) -> None:
        """Keep the function out of a group whose connections were ended; return when it has no exchange there.

        Raises:
            TimeoutError: An exchange does not end.
        """
        with self._changed:
            self._is_open = False
            if not self._changed.wait_for(lambda: not self._num_in_use, _BREAKS_IN_S):
                raise TimeoutError(f"an exchange with other ranks has not ended within {_BREAKS_IN_S:g} s")
            self._changed.wait_for(lambda: self._is_waiting or self._is_held(), _REST_S)

    def join(self, world: World, is_behind: bool) -> None:
        """This process is in another group; `go_on` opens it to the function, once all ranks are there.

        Args:
            world: The place in it.
            is_behind: Whether another rank has taken one step more than this one, which then counts here too.

        Raises:
            RuntimeError: It does not hold the gradients of that step.
        """
        with self._changed:
            if is_behind and not self._is_agreeing and not self.is_new:
                raise RuntimeError("another rank took a step that this rank has no gradients of")
            if self._is_agreeing:
                self._is_agreeing, self._verdict = False, is_behind
                self.num_done += is_behind
                if not is_behind:
                    self._fail()
            self._next = world
            if self.is_new:
                self.place, self._is_placed = GroupPlace(self.place.number, world), True
            self._changed.notify_all()
        if self.is_new:
            self._look_until(lambda: self._has_entered, _FIRST_BATCH_S)

    def go_on(self) -> None:
        """All ranks have joined the other group, if there is one."""
        with self._changed:
            if self._next is None:
                return
            self.place, self._next = GroupPlace(self.place.number + 1, self._next), None
            self._is_open, self._is_broken = True, False
            self._changed.notify_all()
