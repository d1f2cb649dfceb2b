"""Virtual time: events in their order, tasks of workers as generators, and the driver's threads, one at a time.

Nothing here waits in real time. While a thread of the driver blocks, the events run that are due before it may go on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, TypeAlias

Task: TypeAlias = Generator[Any, Any, Any]
"""What a worker does. It yields seconds to wait, or a `Future` to wait for."""

_FAR = float("inf")


class Stopped(BaseException):
    """Ends every thread of the driver: an invariant is broken, or nothing will ever happen again."""


class Future:
    """A value that is not there yet.

    Attributes:
        num_set: How many there were that have come, of all.
    """

    __slots__ = ("_waiting", "error", "is_done", "value")
    num_set = 0

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: Any = None
        self._waiting: list[Callable[[], None]] = []

    def set(self, value: Any = None, error: Any = None) -> None:
        """Brings the value, or the error in its place. Only the first time counts."""
        if self.is_done:
            return
        self.is_done, self.value, self.error = True, value, error
        Future.num_set += 1
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def then(self, go_on: Callable[[], None]) -> None:
        if self.is_done:
            go_on()
        else:
            self._waiting.append(go_on)


class Running:
    """A task that was begun."""

    __slots__ = ("_kernel", "_may_run", "_task", "done", "is_over")

    def __init__(self, kernel: Kernel, task: Task, may_run: Callable[[Callable[[], None]], bool]) -> None:
        self._kernel, self._task, self._may_run = kernel, task, may_run
        self.done = Future()
        self.is_over = False

    def go_on(self, future: Future | None = None) -> None:
        """Runs the task until it waits for something."""
        if self.is_over or not self._may_run(lambda: self.go_on(future)):
            return
        try:
            if future is None:
                wanted = self._task.send(None)
            elif future.error is not None:
                wanted = self._task.throw(future.error)
            else:
                wanted = self._task.send(future.value)
        except StopIteration as end:
            self._end(end.value, None)
        except Stopped:
            raise
        except Exception as error:
            self._end(None, error)
        else:
            if isinstance(wanted, Future):
                wanted.then(lambda: self._kernel.soon(lambda: self.go_on(wanted)))
            else:
                self._kernel.after(wanted, self.go_on)

    def _end(self, value: Any, error: Exception | None) -> None:
        if not self.is_over:
            self.is_over = True
            self.done.set(value, error)

    def kill(self) -> None:
        """It never goes on. Its `done` stays open."""
        self.is_over = True

    def close(self) -> None:
        """Ends it where it waits, as an exception from outside does: what is to be done in any case is done."""
        self.kill()
        self._task.close()


class DriverThread:
    """A thread of the driver, as the kernel sees it.

    Attributes:
        is_user: Whether it makes calls; else the engine began it.
        interrupt: What is raised where it waits next.
        num_waits: How often it has waited.
    """

    def __init__(self, number: int, is_user: bool = True) -> None:
        self.number, self.is_user = number, is_user
        self.baton = threading.Semaphore(0)
        self.until: Callable[[], bool] = lambda: True
        self.deadline = 0.0
        self.interrupt: BaseException | None = None
        self.num_waits = 0
        self.is_over = False


class Kernel:
    """The clock, what is due, and whose turn it is.

    Attributes:
        num_answered: How many calls of the driver have come to an end.

    Args:
        longest_s: When everything has to be over.
        most_events: How many events that may take.
        most_waits: How often the driver may wait.
        tick_s: Everything happens at multiples of this time, much of it at once. None: it happens when it is due.
    """

    def __init__(
        self,
        longest_s: float = 4000.0,
        most_events: int = 150_000,
        most_waits: int = 30_000,
        tick_s: float | None = None,
    ) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.num_answered = 0
        self._latest, self._most, self._most_waits = self.now + longest_s, most_events, most_waits
        self._tick_s = tick_s
        self.threads = [DriverThread(0)]
        self._of_thread = {threading.get_ident(): self.threads[0]}
        self._handles: list[threading.Thread] = []
        self.at_wait: Callable[[DriverThread], None] = lambda thread: None
        self.stopped_by: str | None = None

    # ------------------------------------------------------------------------------------ events

    def note_answer(self) -> None:
        """A call of the driver has come to an end."""
        self.num_answered += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs `action` then."""
        self._num_events += 1
        at = self.now + seconds
        if self._tick_s is not None:
            at = math.ceil(at / self._tick_s) * self._tick_s
        heappush(self._events, (at, self._num_events, action))

    def soon(self, action: Callable[[], None]) -> None:
        self.after(0.0, action)

    def begin(self, task: Task, may_run: Callable[[Callable[[], None]], bool] = lambda go_on: True) -> Running:
        """Begins a task; `may_run` says before each part of it whether it runs, or keeps what goes on later."""
        running = Running(self, task, may_run)
        self.soon(running.go_on)
        return running

    def stop(self, reason: str) -> None:
        """Ends everything: each thread of the driver raises `Stopped` where it waits."""
        if self.stopped_by is None:
            self.stopped_by = reason

    # ------------------------------------------------------------------------------------ threads of the driver

    @property
    def current(self) -> DriverThread:
        return self._of_thread[threading.get_ident()]

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, seconds)

    def block(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits in the calling thread; returns whether `until` holds, or else the time is over."""
        me = self.current
        me.num_waits += 1
        if me.num_waits > self._most_waits:
            self.stop(f"a wait without an end: the driver has waited {me.num_waits} times")
        self.at_wait(me)
        self._raise_interrupt(me)
        me.until, me.deadline = until, _FAR if timeout_s is None else self.now + max(0.0, timeout_s)
        self._switch(me)
        self._raise_interrupt(me)
        return until()

    def _raise_interrupt(self, me: DriverThread) -> None:
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by)
        if me.interrupt is not None:
            error, me.interrupt = me.interrupt, None
            raise error

    def _switch(self, me: DriverThread) -> None:
        other = self._next_thread()
        if other is not me:
            other.baton.release()
            me.baton.acquire()

    def _next_thread(self) -> DriverThread:
        """Lets events happen until a thread may go on."""
        events, earliest, num_set = self._events, -_FAR, -1
        while True:
            # What a thread waits for only comes with a future, or with time: nothing else need be looked at.
            if num_set != Future.num_set or self.now >= earliest or self.stopped_by is not None:
                earliest, num_set = _FAR, Future.num_set
                for thread in self.threads:
                    if thread.is_over:
                        continue
                    is_due = thread.interrupt is not None or thread.until() or self.now >= thread.deadline
                    if is_due or self.stopped_by is not None:
                        return thread
                    earliest = min(earliest, thread.deadline)
            if events and events[0][0] <= earliest:
                at, _, action = heappop(events)
                if at > self.now:
                    self.now = at
                action()
            elif earliest < _FAR:
                self.now = earliest
            else:
                self.stop("a wait without an end: nothing will happen any more")
            if self.now > self._latest:
                self.stop(f"a wait without an end: it goes on after {self.now - 1000.0:.0f} s")
            elif self._num_events > self._most:
                self.stop(f"no end after {self._num_events} events, at {self.now - 1000.0:.1f} s")

    @property
    def users(self) -> list[DriverThread]:
        """The threads that make calls, those that are over included."""
        return [thread for thread in self.threads if thread.is_user]

    def run_thread(self, body: Callable[[], None], is_user: bool = True) -> DriverThread:
        """Begins another thread of the driver, and returns at once."""
        thread = DriverThread(len(self.threads), is_user)
        self.threads.append(thread)

        def run() -> None:
            thread.baton.acquire()
            try:
                body()
            except Stopped:
                pass
            except BaseException as error:
                self.stop(f"a thread of the driver raised {error!r}")
                raise
            finally:
                thread.is_over = True
                if not is_user:
                    self.threads.remove(thread)
                self._pass_on()

        handle = threading.Thread(target=run, name=f"driver-{thread.number}", daemon=True)
        handle.start()
        assert handle.ident is not None
        self._of_thread[handle.ident] = thread
        self._handles.append(handle)
        return thread

    def end_threads(self) -> None:
        """When a run is over: lets each thread that still waits raise `Stopped`, and end."""
        self.stop("the run is over")
        self.threads[0].is_over = True
        self._pass_on()
        for handle in self._handles:
            handle.join(10.0)

    def _pass_on(self) -> None:
        """At the end of a thread: lets another one go on, if there is one."""
        if not all(thread.is_over for thread in self.threads):
            self._next_thread().baton.release()

    def settle(self, seconds: float) -> None:
        """Lets everything happen that is due within this time, after the last thread is done."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until and self.stopped_by is None:
            self.now, _, action = heappop(self._events)
            action()
        self.now = until


class Event:
    """What threads of the driver tell each other by."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._is_set = kernel, False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        return self._is_set or self._kernel.block(lambda: self._is_set, timeout)


class Condition:
    """A reentrant lock for the threads of the driver, which also wait here until another one has changed something."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._owner: DriverThread | None = None
        self._count = 0

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if predicate():
            return True
        me, count = self._kernel.current, self._count
        self._owner, self._count = None, 0
        try:
            return self._kernel.block(lambda: self._owner is None and predicate(), timeout)
        finally:
            self._owner, self._count = me, count

    def notify_all(self) -> None: ...

    def __enter__(self) -> bool:
        me = self._kernel.current
        if self._owner not in (None, me):
            self._kernel.block(lambda: self._owner is None)
        self._owner = me
        self._count += 1
        return True

    def __exit__(self, *exception: Any) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
