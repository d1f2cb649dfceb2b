"""Decides when a run must stop early, because of a signal to the program or because of `max_time`.

See ADR 140.
"""

from __future__ import annotations

import itertools
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

from raysgd.core import arguments as checks
from raysgd.exceptions import Preempted

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds within which a second signal counts as a repetition of the first. `timeout` and Slurm send a signal to a
# process and also to its process group, so the signal may arrive twice.
_SAME_S = 1.0
_FIRST_SAVE_S = 60.0
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")


class Leaving:
    """Decides whether a run must stop early, and gives the reason.

    A run is one call to `fit`, or one run of a training function.

    Args:
        max_time: Time limit of the run, or None.
        now: Function that returns the current time in seconds.

    Attributes:
        signal: The signal that the program received, or None.

    Raises:
        ValueError: `max_time` is not a duration.
    """

    def __init__(self, max_time: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        self._max_s = None if max_time is None else seconds_of(max_time)
        self._now, self._began = now, now()
        self._slowest_save_s: float | None = None
        self._came_at = 0.0
        self._before: dict[int, Any] = {}
        self._expect_end: Callable[[bool], None] = lambda is_ending: None
        self.signal: int | None = None

    def begin(self) -> None:
        """Start measuring the time that `max_time` limits."""
        self._began = self._now()

    def note_save(self, seconds: float) -> None:
        """Record how long saving a checkpoint took.

        The run stops early enough before `max_time` to save two more checkpoints, even if each takes as long as the
        slowest save so far.
        """
        self._slowest_save_s = max(seconds, self._slowest_save_s or 0.0)

    @property
    def may_come(self) -> bool:
        """True if a time limit or a signal could stop the run early."""
        return self._max_s is not None or bool(self._before)

    def is_due(self) -> bool:
        """Return True if the run must stop now."""
        if self.signal is not None or self._max_s is None:
            return self.signal is not None
        save_s = self._slowest_save_s
        reserve_s = min(_FIRST_SAVE_S, self._max_s / 2) if save_s is None else 2 * save_s
        return self._now() - self._began >= self._max_s - reserve_s

    @property
    def reason(self) -> str:
        """Short text for messages that says why the run stops early."""
        return f"`max_time` of {self._max_s:g} s" if self.signal is None else signal.Signals(self.signal).name

    @property
    def since_signal_s(self) -> float:
        """Seconds since the program received the signal."""
        return time.monotonic() - self._came_at

    @contextmanager
    def listening(self, expect_end: Callable[[bool], None] = lambda is_ending: None) -> Iterator[None]:
        """Inside the block, handle the signals that ask the program to end. Afterward, restore the old handlers.

        The first signal only sets flags. Another signal, more than a second later, immediately raises the exception
        that `error` returns. Signals that the program ignores stay ignored. Where signals cannot be handled, for
        example outside the main thread, do nothing.

        Args:
            expect_end: Function that the signal handler calls with True, so that no lost worker is replaced. It
                must do nothing but set flags, because a signal can interrupt the program anywhere. It is called with
                False after the block.
        """
        obstacle = _obstacle()
        if obstacle is not None:
            logger.debug("the run does not listen to signals: it is in %s", obstacle)
            yield
            return
        self._expect_end = expect_end
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):  # None: a handler written in C, such as that of `faulthandler`
                self._before[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for noted, before in self._before.items():
                if signal.getsignal(noted) == self._note:  # if not, the user's program has set another handler: keep it
                    signal.signal(noted, before)
            expect_end(False)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._came_at = number, now
            self._expect_end(True)
        elif now > self._came_at + _SAME_S:
            signal.signal(number, signal.SIG_DFL)
            raise self.error(None)

    def error(self, checkpoint: str | None) -> BaseException:
        """Return the exception to raise after a signal. It ends the program, or the current cell in a notebook.

        Args:
            checkpoint: The newest checkpoint, or None if nothing was saved.
        """
        assert self.signal is not None, "a signal came"
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            return KeyboardInterrupt(self.reason)
        return Preempted(self.signal, checkpoint)

    def end_program(self, checkpoint: str | None) -> NoReturn:
        """Call the handler that the user's program set for the signal, then raise the exception that `error` returns.

        Args:
            checkpoint: The newest checkpoint, or None if nothing was saved.
        """
        assert self.signal is not None, "a signal came"
        handler = self._before.get(self.signal)
        if callable(handler) and not (getattr(handler, "__module__", None) or "").startswith("ray."):
            handler(self.signal, None)
        raise self.error(checkpoint)

    def end_program_soon(self, checkpoint: str | None) -> None:
        """End the program as `end_program` does, once the main thread runs the user's code again.

        Call this method while an iterator is closed, for example because the program has left its `for` loop. Python
        ignores errors that are raised there. So a thread sends the signal again, unless `answer_signal` comes first.

        Args:
            checkpoint: See `end_program`.
        """
        assert self.signal is not None, "a signal came"
        number, main = self.signal, threading.get_ident()
        before = signal.signal(number, lambda number, frame: answer_signal())
        of_user = list(itertools.dropwhile(_is_ours, _frames_of(main)))

        def end() -> None:
            signal.signal(number, before)
            self.end_program(checkpoint)

        def send() -> None:
            while any(map(_is_ours, itertools.takewhile(lambda frame: frame not in of_user, _frames_of(main)))):
                time.sleep(0.001)
            if _pending is end:
                signal.pthread_kill(main, number)  # this thread keeps the GIL, so the main thread is still there

        global _pending
        _pending = end
        threading.Thread(target=send, name="raysgd-signal", daemon=True).start()


_pending: Callable[[], None] | None = None


def answer_signal() -> None:
    """End the program if a signal has asked for it in a loop over epochs that the program has left."""
    global _pending
    if threading.current_thread() is threading.main_thread():
        end, _pending = _pending, None
        if end is not None:
            end()


def _frames_of(thread: int) -> Iterator[FrameType]:
    """Return the frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("raysgd", "contextlib")


def _obstacle() -> str | None:
    """Return the place where this code runs, such as "a worker of Ray", if signals cannot be handled there.

    Otherwise, return None.
    """
    if threading.current_thread() is not threading.main_thread():
        return "another thread than the main one"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        return "a worker of Ray"
    return None


def seconds_of(max_time: Any) -> float:
    """Convert a time limit to seconds.

    Raises:
        ValueError: `max_time` is not a duration.

    Examples:
        >>> [seconds_of(each) for each in (90, timedelta(minutes=2), "01:00:00", "1-00:00:01")]
        [90.0, 120.0, 3600.0, 86401.0]
    """
    if isinstance(max_time, timedelta):
        max_time = max_time.total_seconds()
    duration = _DURATION.fullmatch(max_time.strip()) if isinstance(max_time, str) else None
    if duration is not None:
        days, hours, minutes, seconds = (int(each or 0) for each in duration.groups())
        max_time = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if isinstance(max_time, str):
        raise ValueError(
            f"`max_time={max_time!r}`: need seconds, a `timedelta`, or a text such as '23:30:00' or '1-12:00:00' "
            "(hours, minutes, seconds, and days before them)."
        )
    return float(checks.check_seconds("max_time", max_time, may_be_least=False))
