"""Stores the calls that programs make to a detached trainer, and the answers to these calls.

A call is one call of a trainer's method, such as `train`. Its answer is the result or the exception. Calls run one at a
time and only once. Each answer is stored until a program has received it. If the trainer's workers can outlive its
process and the process dies, Ray starts a new process. A file, the journal, stores what the new process needs to
continue.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.core.files import cache_folder, check_private, make_private, replacing
from raysgd.detached.protocol import packed_answer

logger = logging.getLogger(__name__)

OF_ITERATORS = ("draw", "close")
_MOST_LEFT = 16  # maximum number of answers to store for programs that have ended without receiving them


@dataclass
class LoggedCall:
    """A call that a program made to a detached trainer, as the trainer's process stores it.

    Attributes:
        token: The call's ID, unique across all programs.
        method: Name of the trainer's method.
        program: ID of the program that waits for the answer. None if that program has ended and another program may
            get the answer. An empty string if no program may get the answer: the call is then deleted when it ends.
        words: Description of the program that made the call.
        answer: A future for the pickled `CallOutcome`, which is set when the call ends.
        began_at: Time at which the call started, as returned by `time.time`. None while the call is queued.
        asked: The `CallRequest` with which the program made the call. None for calls of the trainer's process itself.
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
    """Runs calls to a detached trainer one after another in a separate thread, and stores their answers.

    The methods are thread-safe.

    Args:
        note: Function that stores a call and its answer in the journal. Called for each call that has ended, before
            any program can get the answer.
    """

    def __init__(self, note: Callable[[LoggedCall, bytes], None] = lambda call, answer: None) -> None:
        self._note = note
        self._calls: dict[str, LoggedCall] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raysgd-calls")
        self._interruptible: tuple[str, int] | None = None
        self._interrupted: set[str] = set()

    def enqueue(self, call: LoggedCall, body: Callable[[], object]) -> LoggedCall:
        """Add a call to the queue of calls to run. If a call with this ID exists already, return that call instead.

        Args:
            call: The call to run.
            body: Function that runs the call and returns its result.
        """
        with self._lock:
            if call.token in self._calls:
                return self._calls[call.token]
            self._calls[call.token] = call
            self._thread.submit(self._run, call, body)
        return call

    def add_call(self, call: LoggedCall) -> None:
        """Add a call that has ended already, together with its answer, without running it again."""
        with self._lock:
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
        if call.program == "":
            self.confirm(call.token)

    def _end_interrupts(self) -> None:
        """From now on, prevent `interrupt` from raising `KeyboardInterrupt` in the running call.

        If `interrupt` was called earlier, the exception is raised before this method returns.
        """
        with self._lock:
            self._interruptible = None

    def interrupt(self, token: str) -> None:
        """Raise `KeyboardInterrupt` in a call, at once if the call is running, or as soon as it starts.

        The interrupt may arrive in the trainer's process before the call itself does. If the call has ended, the
        interrupt has no effect.
        """
        with self._lock:
            self._interrupted.add(token)
            if self._interruptible is not None and self._interruptible[0] == token:
                thread = ctypes.c_ulong(self._interruptible[1])
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    def is_interrupted(self, token: str) -> bool:
        """Return True if `interrupt` was called for the call with this ID."""
        return token in self._interrupted

    def find(self, token: str) -> LoggedCall | None:
        """Return the call with this ID. Return None if there is none, or if a program has received the answer."""
        return self._calls.get(token)

    def confirm(self, token: str) -> None:
        """Delete a call, because a program has received its answer."""
        with self._lock:
            self._forget(token)

    def _forget(self, token: str) -> None:
        self._calls.pop(token, None)
        self._interrupted.discard(token)

    def running(self) -> LoggedCall | None:
        """Return the oldest call without an answer. It is running or about to start. Return None if there is none."""
        with self._lock:
            return next((call for call in self._calls.values() if not call.answer.done()), None)

    def leave(self, program: str) -> None:
        """Record that a program has ended. Its calls continue, and another program can get their answers."""
        with self._lock:
            for call in self._calls.values():
                if call.program == program:
                    # Only the program that created an iterator could use the answer to a call for its next value.
                    call.program, call.was_left = "" if call.method in OF_ITERATORS else None, True
            ended = [call for call in self._calls.values() if call.answer.done()]
            oldest = [call for call in ended if call.program is None][:-_MOST_LEFT]
            for call in [*(call for call in ended if call.program == ""), *oldest]:
                self._forget(call.token)

    def programs(self) -> set[str]:
        """Return the IDs of the programs that have made calls and have not received the answers yet."""
        with self._lock:
            return {call.program for call in self._calls.values() if call.program}

    def has_others(self, program: str) -> bool:
        """Return True if there are calls whose answers are for a program other than `program`."""
        with self._lock:
            return any(call.program and call.program != program for call in self._calls.values())

    def take_over(self, program: str, assigned: Collection[str] = ()) -> LoggedCall | None:
        """Find the oldest call whose program has ended. Assign this call to the program `program`, and return it.

        Args:
            program: ID of the program that gets the call.
            assigned: IDs of calls that `program` already has. These calls are not returned.

        Returns:
            The call, or None if there is no such call.
        """
        with self._lock:
            for call in self._calls.values():
                if call.was_left and call.program in (None, program) and call.token not in assigned:
                    call.program = program
                    return call
        return None

    def await_all(self, timeout_s: float) -> None:
        """Wait until all calls have ended, or until the timeout expires."""
        deadline = time.monotonic() + timeout_s
        while self.running() is not None and time.monotonic() < deadline:
            time.sleep(0.01)


_MOST_WASTE = 64 * 2**20  # after this many bytes were appended, the journal is rewritten without outdated entries


def journal_path(name: str, actor_id: str) -> Path:
    """Return the path of a detached trainer's journal.

    The journal is in the user's cache folder, where other users cannot write, because `read` unpickles its contents.
    """
    return Path(cache_folder(os.environ, str(Path.home()))) / "detached" / f"{name}-{actor_id}"


class Journal:
    """A file of named entries with which a new process of a detached trainer continues after the old one died.

    If another user could write to the file or to a folder above it, nothing is stored and nothing is read. New entries
    are appended to the file. The methods are thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._waste = 0
        self._is_ended = False

    def put(self, entries: Mapping[str, bytes | None]) -> None:
        """Store entries in one step, and replace older entries with the same names. The value None deletes an entry."""
        record = pickle.dumps(dict(entries))
        with self._lock:
            if self._is_ended or not self._is_private():
                return
            self._append(record)
            self._waste += len(record)
            if self._waste > _MOST_WASTE:
                self._write_again()

    def read(self) -> dict[str, bytes]:
        """Return all entries. If the process died while it appended to the file, cut off the incomplete last record."""
        with self._lock:
            if not self._path.exists() or not self._is_private():
                return {}
            entries, end = self._read()
            os.truncate(self._path, end)
            return entries

    def discard(self) -> None:
        """Delete the file. After this, `put` does nothing."""
        with self._lock:
            self._is_ended = True
            with suppress(OSError):  # another user may own the folder; `put` has then written nothing there
                self._path.unlink()

    def _is_private(self) -> bool:
        """Create the file's folder. Return False if another user could write to the file, which is then not used."""
        try:
            make_private(self._path.parent)
            if os.path.lexists(self._path):
                check_private(self._path)
        except PermissionError as error:
            self._is_ended = True
            logger.warning("the detached trainer keeps no journal, so it ends if its process dies: %s", error)
        return not self._is_ended

    def _append(self, record: bytes) -> None:
        with open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(record)

    def _read(self) -> tuple[dict[str, bytes], int]:
        """Return the latest value of each entry, and the position in the file after the last complete record."""
        entries: dict[str, bytes | None] = {}
        end = 0
        with self._path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                entries |= pickle.load(file)
                end = file.tell()
        return {name: value for name, value in entries.items() if value is not None}, end

    def _write_again(self) -> None:
        """Replace the file with a new file that has only the latest value of each entry."""
        entries, _ = self._read()
        with replacing(str(self._path)) as new:
            pickle.dump(entries, new)
        self._waste = 0
