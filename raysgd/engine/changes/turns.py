"""Calls from several threads come one after the other, and any thread may stop them all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.exceptions import TrainerShutdownError

logger = logging.getLogger(__name__)


class PlaceInLine:
    """A place in the line of calls, kept for a thread that takes its turn later.

    Attributes:
        thread: The thread that has it, once it runs.
        is_interrupted: Whether its call is not to go on.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.is_interrupted = False

    def check_wanted(self) -> None:
        """Raises `KeyboardInterrupt` where its call is not to go on."""
        if self.is_interrupted:
            raise KeyboardInterrupt


class Turns:
    """Gives each thread its turn with the group of a lifecycle."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = lifecycle.clock.make_lock()
        self._num_inside = 0
        self._owner: int | None = None
        self._line: list[PlaceInLine] = []
        self._line_moves = lifecycle.clock.make_condition()

    def reserve(self) -> PlaceInLine:
        """A place ahead of all calls that are made from now on.

        Raises:
            TrainerShutdownError: After `stop`.
        """
        self._lifecycle.check_active()
        place = PlaceInLine()
        self._line.append(place)
        return place

    @contextmanager
    def take(self, place: PlaceInLine | None = None) -> Iterator[None]:
        """One thread after the other. What fails after `stop` fails because of that, and the group ends here.

        Args:
            place: The place of this thread in the line, which is free afterwards; behind all others unless given.

        Raises:
            TrainerShutdownError: After `stop`, or when another thread calls that meanwhile.
            KeyboardInterrupt: After `interrupt` for this place.
        """
        with self._kept(place) if place is not None else nullcontext():
            self._wait_in_line(place)
            if place is not None:
                place.check_wanted()
            with self._lock:
                self._num_inside += 1
                self._owner = threading.get_ident()
                try:
                    self._lifecycle.check_active()
                    if place is not None:
                        place.check_wanted()
                    with self._telling_of_shutdown():
                        yield
                finally:
                    self._num_inside -= 1
                    self._leave_turn()

    @contextmanager
    def take_if_free(self) -> Iterator[bool]:
        """A turn if no call runs or waits, which yields True; else False at once."""
        if self._line or self._num_inside or not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            with self.take():
                yield True
        finally:
            self._lock.release()

    def _leave_turn(self) -> None:
        if not self._num_inside:
            self._owner = None
            self._lifecycle.end_interrupt()
        if self._lifecycle.is_stopped:
            self._lifecycle.stop_group(force=True)

    @contextmanager
    def _kept(self, place: PlaceInLine) -> Iterator[None]:
        place.thread = threading.get_ident()
        try:
            yield
        finally:
            with self._line_moves:
                self._line.remove(place)
                self._line_moves.notify_all()

    def _wait_in_line(self, place: PlaceInLine | None) -> None:
        """Waits for the calls whose places are ahead, unless this thread is inside a call already."""
        if self._owner == threading.get_ident():
            return
        with self._line_moves:
            ahead = self._line[: self._line.index(place)] if place is not None else list(self._line)
            while any(each in self._line for each in ahead) and not (place is not None and place.is_interrupted):
                self._line_moves.wait()

    def interrupt(self, place: PlaceInLine) -> None:
        """From another thread: ends the call of a place, whether it runs or waits, as Ctrl-C inside it would."""
        with self._line_moves:
            place.is_interrupted = True
            self._line_moves.notify_all()
        if place.thread is not None and self._owner == place.thread:
            self._lifecycle.interrupt(place.thread)

    def interrupt_running(self) -> None:
        """From another thread: does the same with the call that is running, if one is."""
        owner = self._owner
        if owner is not None:
            self._lifecycle.interrupt(owner)

    @contextmanager
    def _telling_of_shutdown(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._lifecycle.check_interrupt()
            if not self._lifecycle.is_stopped:
                self._lifecycle.check_active()  # perhaps it fails because of the end of the Ray session
                raise
            message = (
                "The trainer was shut down while this call was running, so the call did not finish. "
                f"{self._lifecycle.spec.words.when_interrupted}"
            )
            cause = error if not isinstance(error, TrainerShutdownError) else None
            raise TrainerShutdownError(message.rstrip()) from cause

    def stop(self, force: bool) -> None:
        """Stops everything, from any thread; a call that is running then raises. A second time it does nothing."""
        lifecycle = self._lifecycle
        if lifecycle.is_stopped:
            return
        lifecycle.refuse_starts()
        if self._num_inside:
            force = True
            lifecycle.kill_workers()
        if not self._lock.acquire(timeout=self._timeout_s):
            logger.warning("a call is running in this process; its worker stops when the call ends")
            return
        try:
            lifecycle.stop_group(force=force)
        finally:
            self._lock.release()

    @property
    def _timeout_s(self) -> float:
        """The time to wait for a call whose workers were killed. One in this process does not end any sooner."""
        group = self._lifecycle.group
        return 0.0 if group is not None and group.is_driver_only else self._lifecycle.release_timeout_s
