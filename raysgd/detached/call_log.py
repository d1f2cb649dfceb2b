"""The calls of a detached trainer: they take turns, each happens once, and its answer stays until a program has it.

Its journal keeps what the next process of the trainer needs to go on, in a file to which is only appended.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from raysgd._files import replacing
from raysgd.detached.protocol import packed_answer

OF_ITERATORS = ("draw", "close")
_MOST_LEFT = 16  # answers to programs that are gone; of one call each, so this is a long series of crashes


@dataclass
class LoggedCall:
    """A call of a program.

    Attributes:
        token: Its number, unique among those of all programs.
        method: The method of the trainer.
        program: The program that waits for the answer; None once that is gone, empty if no other one may have it.
        words: The program that made it, in words.
        answer: What it came to, packed.
        began_at: Since when it has been running, in seconds of `time.time`; None while it waits for its turn.
        asked: What was asked, for the next process of the trainer.
        was_left: Whether the program that made it is gone.
    """

    token: str
    method: str
    program: str | None
    words: str
    answer: Future[bytes] = field(default_factory=Future)
    began_at: float | None = None
    asked: Any = None
    was_left: bool = False

    def __str__(self) -> str:
        since = "waiting" if self.began_at is None else f"for {time.time() - self.began_at:.0f} s"
        return f"`{self.method}` of {self.words}, {since}"


class CallLog:
    """Runs calls in a separate thread, one after the other, and keeps their answers. For any thread.

    Args:
        note: Called with each call and its answer, before any program can have that.
    """

    def __init__(self, note: Callable[[LoggedCall, bytes], None] = lambda call, answer: None) -> None:
        self._note = note
        self._calls: dict[str, LoggedCall] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raysgd-calls")
        self._interruptible: tuple[str, int] | None = None
        self._interrupted: set[str] = set()

    def enqueue(self, call: LoggedCall, body: Callable[[], object]) -> LoggedCall:
        """Let a call take its turn. One that is logged already is not repeated."""
        with self._lock:
            if call.token in self._calls:
                return self._calls[call.token]
            self._calls[call.token] = call
            self._thread.submit(self._run, call, body)
        return call

    def add_call(self, call: LoggedCall) -> None:
        """Keep a call that has its answer."""
        self._calls[call.token] = call

    def _run(self, call: LoggedCall, body: Callable[[], object]) -> None:
        call.began_at = time.time()

        def interruptible() -> object:
            try:
                with self._lock:
                    self._interruptible = call.token, threading.get_ident()
                    if call.token in self._interrupted:
                        raise KeyboardInterrupt
                return body()
            finally:
                self._end_interrupts()

        answer = packed_answer(interruptible)
        self._note(call, answer)
        call.answer.set_result(answer)

    def _end_interrupts(self) -> None:
        """Pass no Ctrl-C on from here on: one that was sent has been raised when this returns or raises."""
        with self._lock:
            self._interruptible = None

    def interrupt(self, token: str) -> None:
        """Raise `KeyboardInterrupt` in a call, now or when it has its turn, also one that has yet to arrive."""
        with self._lock:
            self._interrupted.add(token)
            if self._interruptible is not None and self._interruptible[0] == token:
                thread = ctypes.c_ulong(self._interruptible[1])
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    def is_interrupted(self, token: str) -> bool:
        """Return whether `KeyboardInterrupt` was to be raised in a call."""
        return token in self._interrupted

    def find(self, token: str) -> LoggedCall | None:
        """Return a call whose answer is still there."""
        return self._calls.get(token)

    def confirm(self, token: str) -> None:
        """Forget a call whose answer has arrived."""
        with self._lock:
            self._calls.pop(token, None)
            self._interrupted.discard(token)

    def running(self) -> LoggedCall | None:
        """Return the call that has its turn."""
        with self._lock:
            return next((call for call in self._calls.values() if not call.answer.done()), None)

    def leave(self, program: str) -> None:
        """Note that a program is gone: its calls go on, for the next program that asks for them."""
        with self._lock:
            calls = [call for call in self._calls.values() if call.program == program]
            for call in calls:
                call.program, call.was_left = "" if call.method in OF_ITERATORS else None, True
        for call in calls:
            if call.program == "":  # its iterator ends with the program
                call.answer.add_done_callback(partial(self._forget, call.token))
        self._drop_oldest()

    def _forget(self, token: str, answer: Future[bytes]) -> None:
        self.confirm(token)

    def _drop_oldest(self) -> None:
        with self._lock:
            left = [call.token for call in self._calls.values() if call.program is None and call.answer.done()]
            for token in left[:-_MOST_LEFT]:
                del self._calls[token]

    def programs(self) -> set[str]:
        """Return the programs that wait for answers."""
        with self._lock:
            return {call.program for call in self._calls.values() if call.program}

    def has_others(self, program: str) -> bool:
        """Return whether other programs have calls."""
        with self._lock:
            return any(call.program not in (None, program) for call in self._calls.values())

    def take_over(self, program: str, given: Collection[str] = ()) -> LoggedCall | None:
        """Return the oldest call that no program waits for, but for those `given` before; from now on this one does."""
        with self._lock:
            for call in self._calls.values():
                if call.was_left and call.program in (None, program) and call.token not in given:
                    call.program = program
                    return call
        return None

    def await_all(self, timeout_s: float) -> None:
        """Wait until the calls that are running have an answer."""
        deadline = time.monotonic() + timeout_s
        while self.running() is not None and time.monotonic() < deadline:
            time.sleep(0.01)


_MOST_WASTE = 64 * 2**20  # then what is valid is written to a new file


def journal_path(name: str, actor_id: str) -> Path:
    """Return where the journal of a trainer is: among the caches of the user, which others cannot write to."""
    cache = os.environ.get("RAYSGD_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/raysgd"
    return Path(cache) / "detached" / f"{name}-{actor_id}"


class Journal:
    """Keeps bytes by name, for the next process. For any thread.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waste = 0
        self._is_ended = False

    def put(self, entries: Mapping[str, bytes | None]) -> None:
        """Keep these instead of what has their names, all of them or none; None takes an entry out."""
        record = pickle.dumps(dict(entries))
        with self._lock:
            if self._is_ended:
                return
            self._append(record)
            self._waste += len(record)
            if self._waste > _MOST_WASTE:
                self._write_again()

    def read(self) -> dict[str, bytes]:
        """Return what there is. A record that was not written to its end does not count, and is cut off."""
        with self._lock:
            if not self._path.exists():
                return {}
            found, end = self._found()
            os.truncate(self._path, end)
            return found

    def discard(self) -> None:
        """Remove the file; from now on nothing is kept."""
        with self._lock:
            self._is_ended = True
            self._path.unlink(missing_ok=True)

    def _append(self, record: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(record)

    def _found(self) -> tuple[dict[str, bytes], int]:
        """Return what is valid, and where the last whole record ends."""
        found: dict[str, bytes | None] = {}
        end = 0
        with self._path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                found |= pickle.load(file)
                end = file.tell()
        return {name: value for name, value in found.items() if value is not None}, end

    def _write_again(self) -> None:
        """Write a new file with what is valid."""
        found, _ = self._found()
        with replacing(str(self._path)) as new:
            pickle.dump(found, new)
        self._waste = 0
