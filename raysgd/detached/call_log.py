"""Stores the calls that programs make to a detached trainer, and their answers.

Calls run one at a time and only once. Each answer is stored until a program has received it. If the trainer's process
dies, Ray starts another. A journal, an append-only file, stores what that process needs to continue.
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

from raysgd.core.files import replacing
from raysgd.detached.protocol import packed_answer

OF_ITERATORS = ("draw", "close")
_MOST_LEFT = 16  # most unclaimed answers of ended programs; usually one per program that has crashed


@dataclass
class LoggedCall:
    """A call that a program made to a detached trainer.

    Attributes:
        token: The call's ID, unique across all programs.
        method: Name of the trainer's method.
        program: ID of the program that waits for the answer. None if that program has ended and another program may
            claim the call; empty if no other program may claim it.
        words: Description of the program that made the call.
        answer: Receives the pickled outcome, a `CallOutcome`.
        began_at: Start time of the call, in seconds as in `time.time`. None while the call is queued.
        asked: The `CallRequest`, stored for the trainer's next process.
        was_left: True if the program that made the call has ended.
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
    """Runs calls one after another in a separate thread and stores their answers. Thread-safe.

    Args:
        note: Called with each call and its answer, before any program can get the answer. Stores them in the journal.
    """

    def __init__(self, note: Callable[[LoggedCall, bytes], None] = lambda call, answer: None) -> None:
        self._note = note
        self._calls: dict[str, LoggedCall] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raysgd-calls")
        self._interruptible: tuple[str, int] | None = None
        self._interrupted: set[str] = set()

    def enqueue(self, call: LoggedCall, body: Callable[[], object]) -> LoggedCall:
        """Queue a call. A call that is already logged is not repeated."""
        with self._lock:
            if call.token in self._calls:
                return self._calls[call.token]
            self._calls[call.token] = call
            self._thread.submit(self._run, call, body)
        return call

    def add_call(self, call: LoggedCall) -> None:
        """Add a call that already has its answer."""
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
        """Stop accepting interrupts for the running call. An interrupt sent earlier is raised before this returns."""
        with self._lock:
            self._interruptible = None

    def interrupt(self, token: str) -> None:
        """Raise `KeyboardInterrupt` in a call, now or when it starts, even if the call has not arrived yet."""
        with self._lock:
            self._interrupted.add(token)
            if self._interruptible is not None and self._interruptible[0] == token:
                thread = ctypes.c_ulong(self._interruptible[1])
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    def is_interrupted(self, token: str) -> bool:
        """Return True if `interrupt` was called for a call."""
        return token in self._interrupted

    def find(self, token: str) -> LoggedCall | None:
        """Return the call with this ID, or None if it is unknown or was confirmed."""
        return self._calls.get(token)

    def confirm(self, token: str) -> None:
        """Discard a call whose answer a program has received."""
        with self._lock:
            self._calls.pop(token, None)
            self._interrupted.discard(token)

    def running(self) -> LoggedCall | None:
        """Return the first call without an answer, which is running or next in the queue. None if there is none."""
        with self._lock:
            return next((call for call in self._calls.values() if not call.answer.done()), None)

    def leave(self, program: str) -> None:
        """Record that a program has ended. Its calls continue, and the next program can claim them."""
        with self._lock:
            calls = [call for call in self._calls.values() if call.program == program]
            for call in calls:
                call.program, call.was_left = "" if call.method in OF_ITERATORS else None, True
        for call in calls:
            # the call belongs to an iterator, which only the program that created it can use, so nobody may claim the
            # answer
            if call.program == "":
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
        """Return the IDs of the programs that wait for answers."""
        with self._lock:
            return {call.program for call in self._calls.values() if call.program}

    def has_others(self, program: str) -> bool:
        """Return True if any program other than `program` waits for an answer."""
        with self._lock:
            return any(call.program not in (None, program) for call in self._calls.values())

    def take_over(self, program: str, given: Collection[str] = ()) -> LoggedCall | None:
        """Assign the oldest call whose program has ended to `program` and return the call. Skip calls in `given`."""
        with self._lock:
            for call in self._calls.values():
                if call.was_left and call.program in (None, program) and call.token not in given:
                    call.program = program
                    return call
        return None

    def await_all(self, timeout_s: float) -> None:
        """Wait until all calls have an answer, or until the timeout expires."""
        deadline = time.monotonic() + timeout_s
        while self.running() is not None and time.monotonic() < deadline:
            time.sleep(0.01)


_MOST_WASTE = 64 * 2**20  # after this many bytes, the journal is rewritten without outdated entries


def journal_path(name: str, actor_id: str) -> Path:
    """Return the path of a trainer's journal. It is in the user's cache folder, where other users cannot write."""
    cache = os.environ.get("RAYSGD_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/raysgd"
    return Path(cache) / "detached" / f"{name}-{actor_id}"


class Journal:
    """An append-only file that stores named entries for the detached trainer's next process. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waste = 0
        self._is_ended = False

    def put(self, entries: Mapping[str, bytes | None]) -> None:
        """Store all entries atomically, replacing older entries with the same names. None deletes an entry."""
        record = pickle.dumps(dict(entries))
        with self._lock:
            if self._is_ended:
                return
            self._append(record)
            self._waste += len(record)
            if self._waste > _MOST_WASTE:
                self._write_again()

    def read(self) -> dict[str, bytes]:
        """Return all entries. An incomplete record at the end is ignored and cut off."""
        with self._lock:
            if not self._path.exists():
                return {}
            found, end = self._found()
            os.truncate(self._path, end)
            return found

    def discard(self) -> None:
        """Delete the file. Later entries are not stored."""
        with self._lock:
            self._is_ended = True
            self._path.unlink(missing_ok=True)

    def _append(self, record: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(record)

    def _found(self) -> tuple[dict[str, bytes], int]:
        """Return the valid entries and the end offset of the last complete record."""
        found: dict[str, bytes | None] = {}
        end = 0
        with self._path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                found |= pickle.load(file)
                end = file.tell()
        return {name: value for name, value in found.items() if value is not None}, end

    def _write_again(self) -> None:
        """Replace the file with a new file that has only the valid entries."""
        found, _ = self._found()
        with replacing(str(self._path)) as new:
            pickle.dump(found, new)
        self._waste = 0
