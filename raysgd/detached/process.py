"""Defines the Ray actor that contains a detached trainer, and the requests that programs send to it.

The actor accepts calls from any program, and ends when no program has needed the trainer for a while.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from raysgd._version import __version__
from raysgd.core.cluster import keeper as outliving
from raysgd.detached.call_log import OF_ITERATORS, CallLog, Journal, LoggedCall, journal_path
from raysgd.detached.protocol import Detached, Output, Piece, RemoteIterator, packed_answer, unpacked_arguments
from raysgd.exceptions import OnFailure, TrainerLostError, failure_logged
from raysgd.storage import open_folder

logger = logging.getLogger(__name__)

_NEWS_S = 1.0
_LOOK_S = 0.05
_DEATH_S = 4.0
_MOST_DEATHS = 3  # a call fails after this process has died this many times at the same point of the call
_START_S = 60.0  # before the trainer is created: seconds without an attached program after which this process ends
_END_S = 5.0
_CALL = "call:"  # prefix of the journal entries that store calls
_PROGRAM = "program:"  # prefix of the journal entries that store attached programs
_TAKEN = "taken:"  # prefix of the journal entries that store the program to which `pending` has assigned a call
_FATAL = (
    "{} times at the same place, so it is not taken up again: look for a callback that ends the process or takes too "
    "much memory. The trainer can be used"
)
_NOT_TAKEN_UP = (*OF_ITERATORS, "epochs")


@dataclass(frozen=True)
class CallRequest:
    """A call that a program sends to the trainer's process.

    Attributes:
        token: The call's ID, unique across all programs.
        kind: What to do: "start" creates the trainer, "call" calls a method of the trainer, "draw" returns the next
            value of an iterator that a method has returned, "close" closes such an iterator.
        name: Name of the trainer's class ("start") or method ("call"). Otherwise the ID of the call that returned the
            iterator.
        arguments: The pickled arguments.
        program: ID of the program that makes the call.
        words: Description of this program for users of other programs.
        folder: Working directory of this program. Relative paths in the arguments start there.
    """

    token: str
    kind: str
    name: str
    arguments: bytes
    program: str
    words: str
    folder: str


class TrainerProcess:
    """The actor class of a detached trainer. Contains the trainer, and a log of the calls that programs made to it.

    All calls to the trainer run in one thread. Requests that use the trainer without waiting for these calls, such as
    `look`, run in other threads. The actor's event loop therefore stays free to answer other requests.

    Args:
        settings: The user's settings for the detached trainer.
        log_level: Log level of the program that created the trainer.
        is_lasting: True if the trainer's workers continue when this process dies. Ray then restarts the process, and
            the restarted process continues with the same workers.
    """

    def __init__(self, settings: Detached, log_level: int, is_lasting: bool) -> None:
        import ray

        context = ray.get_runtime_context()
        self._settings = settings
        self._output = Output(time.time_ns())
        self._output.install(log_level)
        self._log = CallLog(self._note_answer)
        self._journal = Journal(journal_path(settings.name, str(context.get_actor_id())))
        self._keeper = outliving.Keeper(settings.name, lambda group: self._write(lambda: {"group": group}))
        self._is_lasting = is_lasting
        self._kept_trainer: Any = None
        self._taken_up: str | None = None
        self._trainer: Any = None
        self._is_made = threading.Event()
        self._iterators: dict[str, tuple[str, Iterator[Any]]] = {}
        self._programs: dict[str, str] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._needed_at = time.monotonic()
        if is_lasting:
            outliving.keep(self._keeper)
        self._is_second_life = context.was_current_actor_reconstructed
        if self._is_second_life:
            self._take_up(self._journal.read())
        threading.Thread(target=self._end_when_forgotten, name="raysgd-keep-alive", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ attached programs

    async def stay(self, program: str) -> None:
        """Wait until a program detaches. If the program ends without detaching, Ray cancels this request.

        When this request ends, this process records that the program is gone. If this process dies and Ray restarts it,
        Ray also repeats the request in the restarted process.
        """
        await self._leaving.setdefault(program, asyncio.Event()).wait()

    async def attach(self, program: str, words: str, presence: list[Any]) -> None:
        """Record that a program is attached to the trainer. The program stays attached until its request `stay` ends.

        Args:
            program: ID of the program.
            words: Description of the program.
            presence: A list with Ray's object reference to the program's `stay` request.
        """
        from ray import cloudpickle

        self._write(lambda: {f"{_PROGRAM}{program}": cloudpickle.dumps((words, presence[0]))})
        self._note_program(program, words, presence[0])

    def _note_program(self, program: str, words: str, presence: Any) -> None:
        self._programs[program] = words
        presence.future().add_done_callback(lambda answer: self._note_end(program))

    def _note_end(self, program: str) -> None:
        """Record that a program has ended or detached.

        Called in one of Ray's threads when the program's `stay` request ends.
        """
        self._programs.pop(program, None)
        self._leaving.pop(program, None)
        self._write(lambda: {f"{_PROGRAM}{program}": None})
        self._needed_at = time.monotonic()
        for token, (owner, _) in list(self._iterators.items()):
            if owner == program:
                call = LoggedCall(f"{token}-end", "close", program, "the trainer")
                self._log.enqueue(call, partial(self._close, token))
        self._log.leave(program)

    async def detach(self, program: str) -> None:
        """End a program's `stay` request, because the program no longer needs the trainer."""
        self._leaving.setdefault(program, asyncio.Event()).set()

    async def describe(self) -> dict[str, Any]:
        """Return the trainer's status as a dict of plain values, so that other versions of raysgd can read it."""
        running = self._log.running()
        return {
            "name": self._settings.name,
            "version": __version__,
            "pid": os.getpid(),
            "trainer": "starting" if self._trainer is None else await asyncio.to_thread(repr, self._trainer),
            "running": None if running is None else str(running),
            "programs": list(self._programs.values()),
            "ends_in_s": self._ends_in_s(),
        }

    def _ends_in_s(self) -> float | None:
        """Return the number of seconds after which the trainer ends if no program attaches.

        Return None if a program is attached, a call is running, or there is no limit (`keep_alive_s=None`).
        """
        keep_alive_s = self._settings.keep_alive_s if self._trainer is not None else _START_S
        if keep_alive_s is None or self._is_needed():
            return None
        return max(0.0, self._needed_at + keep_alive_s - time.monotonic())

    def _is_needed(self) -> bool:
        return bool(self._programs) or self._log.running() is not None

    def _end_when_forgotten(self) -> None:
        while (left_s := self._ends_in_s()) is None or left_s > 0:
            if self._is_needed():
                self._needed_at = time.monotonic()
            time.sleep(min(1.0, (self._settings.keep_alive_s or 1.0) / 10))
        self._save_and_end()

    def _save_and_end(self) -> None:
        import ray

        # No attached program could receive an error, and resources must still be freed.
        name, log = self._settings.name, logger.exception
        with failure_logged(log, "the detached trainer `%s` could not be saved: %s", name):
            self._save_left("the detached trainer was not needed any more")
        with failure_logged(log, "the workers of the detached trainer `%s` could not be ended: %s", name):
            self._end_trainer()
        self._journal.discard()
        ray.kill(ray.get_runtime_context().current_actor)

    def _save_left(self, reason: str) -> str | None:
        """Save the trainer as `KeptTrainer.save_left` does, if this type of trainer can be saved this way."""
        return None if self._kept_trainer is None else self._kept_trainer.save_left(reason)

    async def save_left(self) -> bytes:
        """Save the trainer before `raysgd stop` ends it, unless a call is running or the settings name no folder.

        Returns:
            A pickled pair: the path of the saved file, or None if nothing was saved; and a description of the running
            call that prevented saving, or None.
        """
        return await asyncio.to_thread(packed_answer, self._save_unless_busy)

    def _save_unless_busy(self) -> tuple[str | None, str | None]:
        running = self._log.running()
        if self._settings.folder is not None and running is not None:
            return None, str(running)
        return self._save_left("`raysgd stop` has ended the detached trainer"), None

    # ------------------------------------------------------------------------------------------------------------ calls

    async def run(self, asked: CallRequest) -> tuple[bytes, int] | None:
        """Queue a call, wait until it has ended, and return what the method `answer` returns for it."""
        await self.begin(asked)
        return await self.answer(asked.token)

    async def begin(self, asked: CallRequest) -> None:
        """Queue a call, unless it was queued before or the program that made it has ended."""
        if self._log.find(asked.token) is None and asked.program in self._programs:
            if asked.kind != "start":
                self._write(lambda: {_entry(asked.token): pickle.dumps((asked, None))})
            self._log.enqueue(_logged(asked), partial(self._do, asked))

    def _write(self, entries: Callable[[], Mapping[str, bytes | None]]) -> None:
        """Store entries in the journal, from which a restarted process continues if this process dies.

        If storing fails, training continues, but a restarted process can no longer continue it.

        Args:
            entries: Function that returns the entries by name. Called only if the journal is in use.
        """
        if not self._is_lasting:
            return
        try:
            self._journal.put(entries())
        except Exception as error:  # raised by Ray, by the file system, or by a user's object that cannot be pickled
            self._is_lasting = False
            self._journal.discard()
            words = (
                "detached trainer `%s` could not write down what it does, so its trainer ends if its process dies: %s"
            )
            logger.warning(words, self._settings.name, error)

    def _note_answer(self, call: LoggedCall, answer: bytes) -> None:
        """Store in the journal the answer of a call that has ended, and what the call changed in the trainer."""
        if self._kept_trainer is not None and call.token == self._taken_up:
            self._kept_trainer.leave_call(is_interrupted=self._log.is_interrupted(call.token))
        asked: CallRequest | None = call.asked
        if asked is not None:
            self._write(partial(self._after_call, asked, answer))

    def _after_call(self, asked: CallRequest, answer: bytes) -> dict[str, bytes | None]:
        entries: dict[str, bytes | None] = {"fit": None}
        # Now that the trainer exists, a restarted process can create it again and continue.
        if asked.kind == "start" and self._trainer is not None:
            entries["start"] = pickle.dumps(asked)
        if self._kept_trainer is not None:
            entries |= self._kept_trainer.changes()
        entries[_entry(asked.token)] = pickle.dumps((replace(asked, arguments=b""), answer))
        return entries

    def _note_fit(self, progress: Any) -> None:
        kept = self._kept_trainer
        assert kept is not None, "only trainers that are kept tell of `fit`"
        self._write(lambda: {"fit": pickle.dumps(progress), **kept.changes()})

    def _take_up(self, kept: dict[str, bytes]) -> None:
        """In a restarted process, continue with the workers and calls of the process that died.

        If the journal has no entry from which to create the trainer, end the workers and this process.

        Args:
            kept: The entries of the journal.
        """
        if "start" not in kept:  # the trainer had not been created yet, or the journal is on another node
            outliving.end_workers(self._settings.name)
            self._settings = replace(self._settings, keep_alive_s=None)
            threading.Thread(target=self._save_and_end, daemon=True).start()
            return
        self._keeper.take_up(kept.get("group"))
        start = pickle.loads(kept["start"])
        calls = [pickle.loads(value) for name, value in kept.items() if name.startswith(_CALL)]
        running: CallRequest | None = next((asked for asked, answer in calls if answer is None), None)
        num_deaths = 0 if running is None else self._num_deaths(running, kept)
        self._taken_up = None if running is None else running.token
        self._log.enqueue(LoggedCall("restart", "start", "", "the trainer"), partial(self._restore, start, kept))
        for asked, answer in calls:
            call = _logged(asked)
            if (taken := kept.get(f"{_TAKEN}{call.token}")) is not None:
                call.program, call.was_left = taken.decode(), True
            if answer is not None:
                call.answer.set_result(answer)
                self._log.add_call(call)
            elif call.method in _NOT_TAKEN_UP:
                self._log.enqueue(call, partial(self._refuse, call.method, "which cannot be taken up: call it again"))
            elif asked is running and num_deaths >= _MOST_DEATHS:
                self._log.enqueue(call, partial(self._refuse, call.method, _FATAL.format(num_deaths)))
            else:
                self._log.enqueue(call, partial(self._do, asked))
        programs = {name.removeprefix(_PROGRAM): name for name in kept if name.startswith(_PROGRAM)}
        for program in self._log.programs() - set(programs):
            self._log.leave(program)
        for program, name in programs.items():
            self._note_program(program, *pickle.loads(kept[name]))

    def _num_deaths(self, running: CallRequest, kept: dict[str, bytes]) -> int:
        """Record that the process died during a call, and return how many times it died at this point of the call.

        If the call is `fit`, deaths before its last completed epoch do not count.

        Args:
            running: The call during which the process died.
            kept: The entries of the journal.
        """
        place = running.token, zlib.crc32(kept.get("fit", b""))
        former, number = pickle.loads(kept["deaths"]) if "deaths" in kept else (None, 0)
        number = number + 1 if place == former else 1
        self._write(lambda: {"deaths": pickle.dumps((place, number))})
        words = "the process of `%s` has died in `%s` (%d of at most %d times at one place); another one goes on"
        logger.warning(words, self._settings.name, _logged(running).method, number, _MOST_DEATHS)
        return number

    def _restore(self, start: CallRequest, kept: dict[str, bytes]) -> None:

        def end() -> None:
            """End this process. Programs that wait for calls then get a `TrainerLostError`."""
            logger.exception("the detached trainer `%s` could not be taken up", self._settings.name)
            self._save_and_end()

        with OnFailure(end):
            self._make(start)
            assert self._kept_trainer is not None, "the trainer was just made"
            self._kept_trainer.take_over(kept)
        self._is_made.set()

    def _refuse(self, method: str, why: str) -> None:
        raise TrainerLostError(f"The trainer's process has died in `{method}`, {why}.")

    async def answer(self, token: str) -> tuple[bytes, int] | None:
        """Wait until a call has ended. Return its pickled answer, and the number for the next piece of output.

        Return None if there is no such call, for example because another program has received the answer already.

        Args:
            token: ID of the call.
        """
        call = self._log.find(token)
        if call is None:
            return None
        answer = await asyncio.shield(asyncio.wrap_future(call.answer))
        return answer, self._output.num_pieces()

    async def confirm(self, token: str) -> None:
        """Delete a call and its answer, because a program has received the answer."""
        self._log.confirm(token)
        self._write(lambda: {_entry(token): None, f"{_TAKEN}{token}": None})

    async def interrupt(self, token: str) -> None:
        """Raise `KeyboardInterrupt` in a call, and wait until the call has ended.

        If this process dies during the wait, Ray repeats the request, and so the interrupt, in the restarted process.
        """
        self._log.interrupt(token)
        await self.answer(token)

    async def pending(self, program: str, assigned: Collection[str]) -> tuple[str, str] | None:
        """Find a call whose program has ended, and assign it to another program, which can then request its answer.

        Ray reports the end of a program only after about 2 s. If other programs have calls, this method therefore waits
        a few seconds for one of these programs to end. The call that creates the trainer is found only if it failed,
        because otherwise it has no result for the user.

        Args:
            program: ID of the program to assign the call to.
            assigned: IDs of calls that this program has got already.

        Returns:
            The ID of the call and the name of the trainer's method, or None if there is no such call.
        """
        call = await self._left_call(program, assigned)
        if call is not None and call.asked is not None and call.asked.kind == "start":
            await asyncio.shield(asyncio.wrap_future(call.answer))
            if self._trainer is not None:
                await self.confirm(call.token)
                call = await self._left_call(program, assigned)
        if call is None:
            return None
        self._write(lambda: {f"{_TAKEN}{call.token}": program.encode()})
        return call.token, call.method

    async def _left_call(self, program: str, assigned: Collection[str]) -> LoggedCall | None:
        deadline = time.monotonic() + _DEATH_S
        while (call := self._log.take_over(program, assigned)) is None and self._log.has_others(program):
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(_LOOK_S)
        return call

    async def has_ended(self, token: str) -> bool:
        """Return True if the call with this ID has ended, or does not exist."""
        call = self._log.find(token)
        return call is None or call.answer.done()

    async def news(
        self, token: str | None, seen: int | None, knows_other: bool = True
    ) -> tuple[int, list[Piece], str | None, bool]:
        """Wait until the trainer prints something, or a program's call has ended, but at most about a second.

        Return at once if the program's call still waits for another call and `knows_other` is False.

        Args:
            token: ID of the program's call. None for the call that is running now.
            seen: The number that the previous call of this method returned to the program. None in the first call.
            knows_other: True if an earlier result of this method described the other call that the program's call waits
                for.

        Returns:
            The number for the next piece of output; the pieces that are new to the program; a description of the other
            call that is running, or None; and whether the program's call has ended.
        """
        mine = self._log.running() if token is None else self._log.find(token)
        deadline = time.monotonic() + _NEWS_S
        while True:
            num_pieces, pieces = self._output.since(seen)
            first, has_ended = self._log.running(), mine is None or mine.answer.done()
            other = str(first) if first is not None and mine is not None and first.token != mine.token else None
            if pieces or has_ended or (other is not None and not knows_other) or time.monotonic() >= deadline:
                return num_pieces, pieces, other, has_ended
            await asyncio.sleep(_LOOK_S)

    def _do(self, asked: CallRequest) -> Any:
        if Path(asked.folder).is_dir():  # false if the program runs on another node and this node has no such folder
            os.chdir(asked.folder)
        if asked.kind == "draw":
            return self._draw(asked.name)
        if asked.kind == "close":
            return self._close(asked.name)
        if asked.kind == "start":
            if self._settings.folder is not None:
                open_folder(self._settings.folder, argument="folder").make()
            self._make(asked)
            self._is_made.set()
            return None
        args, kwargs = unpacked_arguments(asked.arguments)
        return self._kept(asked, getattr(self._trainer, asked.name)(*args, **kwargs))

    def _make(self, asked: CallRequest) -> None:
        (trainer_cls, *args), kwargs = unpacked_arguments(asked.arguments)
        self._trainer = trainer_cls(*args, **kwargs)
        folder, note_fit = self._settings.folder, self._note_fit if self._is_lasting else None
        left_file = None if folder is None else f"{str(folder).rstrip('/')}/{self._settings.name}.pt"
        self._kept_trainer = self._trainer._kept_by(self._keeper, left_file, note_fit)

    def _kept(self, asked: CallRequest, value: Any) -> Any:
        if not isinstance(value, Iterator):
            return value
        self._iterators[asked.token] = asked.program, value
        return RemoteIterator(asked.token)

    def _draw(self, token: str) -> list[Any]:
        """Return the next value of an iterator as a list with one item, or an empty list at the iterator's end."""
        if token not in self._iterators:
            if self._is_second_life:
                raise TrainerLostError("The trainer's process has died, and the iterator with it: make a new one.")
            return []
        return list(islice(self._iterators[token][1], 1))

    def _close(self, token: str) -> None:
        _, iterator = self._iterators.pop(token, (None, None))
        close: Callable[[], object] | None = getattr(iterator, "close", None)
        if close is not None:
            close()

    # ------------------------------------------------------------------------------------------- in parallel with calls

    async def look(self, name: str, is_method: bool, arguments: bytes) -> bytes:
        """Read an attribute of the trainer, or call one of its methods, while another call may be running.

        Args:
            name: Name of the attribute or method.
            is_method: True if it is a method.
            arguments: The pickled arguments of the method.

        Returns:
            The pickled `CallOutcome`.
        """
        return await asyncio.to_thread(packed_answer, partial(self._look, name, is_method, arguments))

    def _look(self, name: str, is_method: bool, arguments: bytes) -> Any:
        self._is_made.wait()
        attribute = getattr(self._trainer, name)
        if not is_method:
            return attribute
        args, kwargs = unpacked_arguments(arguments)
        return attribute(*args, **kwargs)

    async def help_on(self, name: str) -> str | None:
        """Return the help text of a trainer's method, "" if `name` is an attribute, or None if there is neither."""
        await asyncio.to_thread(self._is_made.wait)
        if callable(getattr(type(self._trainer), name, None)):
            method = getattr(self._trainer, name)
            return f"{name}{inspect.signature(method)}\n\n{inspect.getdoc(method) or ''}"
        return "" if hasattr(self._trainer, name) else None

    async def end(self, force: bool) -> bytes:
        """Shut down the trainer, so that the program can kill this actor when it has the answer.

        If a call is running, the call raises `TrainerShutdownError`.

        Args:
            force: True to kill the workers immediately, without letting them shut down cleanly.

        Returns:
            A pickled `CallOutcome`, which contains the exception if the shutdown failed.
        """
        answer = await asyncio.to_thread(packed_answer, partial(self._end, force))
        for leaving in list(self._leaving.values()):
            leaving.set()
        await asyncio.sleep(_LOOK_S)  # wait until the answers to all requests have been sent to the programs
        return answer

    def _end_trainer(self, force: bool = False) -> None:
        """Call the trainer's method `shutdown`, if there is one.

        A trainer that only has a `fit()` method has no `shutdown`. The workers of such a trainer end with this process.
        """
        shutdown = getattr(self._trainer, "shutdown", None)
        if shutdown is not None:
            knows_force = "force" in inspect.signature(shutdown).parameters
            shutdown(**({"force": force} if knows_force else {}))

    def _end(self, force: bool) -> None:
        try:
            self._end_trainer(force)
        finally:
            self._log.await_all(_END_S)
            self._journal.discard()


def _entry(token: str) -> str:
    """Return the name of the journal entry that stores the call with this ID."""
    return f"{_CALL}{token}"


def _logged(asked: CallRequest) -> LoggedCall:
    method = asked.name if asked.kind == "call" else asked.kind
    return LoggedCall(asked.token, method, asked.program, asked.words, asked=asked)
