"""Defines `DetachedTrainer`, a program's handle to a trainer that runs in another process and outlives the program."""

from __future__ import annotations

import getpass
import logging
import os
import pickle
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from raysgd.core.cluster.keeper import NAMESPACE, end_workers
from raysgd.core.cluster.ray_cluster import end_with, session
from raysgd.core.engine.shared.interface import CallHandle
from raysgd.core.sending import SentData
from raysgd.core.text.tracebacks import hide_library_frames, hides_library_frames
from raysgd.detached.call_log import Journal, journal_path
from raysgd.detached.process import CallRequest
from raysgd.detached.protocol import (
    BESIDE,
    MAY_GO_ON,
    STAYS_THERE,
    CallOutcome,
    Piece,
    RemoteIterator,
    packed_arguments,
    show,
    unpacked_answer,
)
from raysgd.exceptions import TrainerLostError, TrainerShutdownError

ANSWER_S = 20.0  # seconds without an answer to a request, after which a trainer's process counts as not answering
_BRIEF_S = 0.2  # seconds after which the output of a call is requested while the call still runs
_DETACH_S = 1.0
_DATA = ("dataset", "validation_dataset")
_NUM_KNOWN_DATA = 4
_NO_ARGUMENTS = pickle.dumps(((), {}))

_SILENT = (
    "detached trainer `%s` is not answering: its process is stopped, busy or starting. `raysgd stop %s --force` ends it"
)

logger = logging.getLogger(__name__)


class DetachedTrainer:
    """A handle to a trainer that runs in a separate process and outlives this program.

    The handle has the public methods and attributes of the trainer, which is a `TorchTrainer`, a `TFTrainer` or a
    trainer of `raysgd.train`. A few that only work in the trainer's process, such as `worker_group`, raise an error
    with advice. Each call of a method runs in the trainer's process. Several programs may have handles to the same
    trainer. Their calls run one at a time, but `status` and `ledger` run at once.

    While your program waits for a call, it prints the trainer's output. Ctrl-C ends the call, as it does for a trainer
    in your program. If your program ends without calling `shutdown`, the trainer continues. It ends after
    `keep_alive_s` seconds without a program and without a running call (see `Detached`).

    Args:
        name: The trainer's name.
        actor: Ray's handle to the actor that contains the trainer.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self._actor, self._session = name, actor, session()
        self._program, self._words = uuid.uuid4().hex, _this_program()
        self._given: list[str] = []
        self._seen: int | None = None
        self._help: dict[str, str] = {}
        self._sent: deque[SentData] = deque(maxlen=_NUM_KNOWN_DATA)
        self._is_ended = False
        # This request stays unanswered while this program needs the trainer. When the program ends, Ray cancels the
        # request, and the trainer's process records that the program has ended.
        self._presence = actor.stay.remote(self._program)
        self._ask("attach", self._program, self._words, [self._presence])
        self._finalizer = end_with(self, _detach, actor, self._program, self._session)

    def pending(self) -> DetachedCall | None:
        """Return a call whose program ended before it received the result, or None if there is no such call.

        The call may still be running. Call `result` of the returned object to get the call's result. Each such call is
        returned only once to this program.
        """
        pending = self._ask("pending", self._program, self._given)
        if pending is None:
            return None
        token, method = pending
        self._given.append(token)
        return DetachedCall(self, token, method)

    def shutdown(self, force: bool = False) -> None:
        """End the trainer, its workers and its process, and free their resources. Calling this again does nothing.

        If the trainer is running a call for any program, that call raises `TrainerShutdownError`. If the Ray session of
        this handle has ended, only a warning is logged.

        Args:
            force: True to kill the workers immediately, without letting them shut down cleanly.
        """
        if self._is_ended:
            return
        import ray
        from ray.exceptions import RayActorError

        if session() != self._session:
            self._finalizer.detach()
            logger.warning(
                "detached trainer `%s` is not shut down from here: the Ray session of this handle has ended. If its "
                "cluster still runs, use `raysgd.attach(%r).shutdown()`",
                self._name,
                self._name,
            )
            return
        answer = CallOutcome()
        try:
            if is_answering(self._actor):
                answer = unpacked_answer(ray.get(self._actor.end.remote(force)))
        except RayActorError:  # raised if the trainer has already ended
            pass
        finally:
            self._is_ended = True
            self._finalizer.detach()
            kill(self._name, self._actor)
        answer.result()

    def __enter__(self) -> DetachedTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=error is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
        if name in STAYS_THERE:
            raise AttributeError(f"`{name}` of a detached trainer: {STAYS_THERE[name]}")
        text = self._help_on(name)
        if not text:
            return self._look(name, False, _NO_ARGUMENTS)
        method = partial(self._beside if name in BESIDE else self._call, name)
        method.__doc__ = text
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"`{name} = ...`: it would stay in this program; the trainer `{self._name}` is in another process. Use "
                "`update_config`, `apply_all_operators(fn)`, or a variable of your own."
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        theirs: list[str] = []
        with suppress(TrainerLostError, TrainerShutdownError):
            theirs = self._look("__dir__", True, _NO_ARGUMENTS)
        return [*super().__dir__(), *(name for name in theirs if not name.startswith("_") and name not in STAYS_THERE)]

    def __repr__(self) -> str:
        if session() != self._session:
            return f"<detached {self._name}: its Ray session has ended>"
        try:
            known = self._ask("describe")
        except (TrainerLostError, TrainerShutdownError):
            return f"<detached {self._name}: ended>"
        return f"<detached {self._name}: {known['trainer']}>"

    def _repr_html_(self) -> Any:
        with suppress(TrainerLostError, TrainerShutdownError):  # if this fails, a notebook shows the `repr` instead
            return self._look("_repr_html_", True, _NO_ARGUMENTS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._name,)

    # ------------------------------------------------------------------------------------------------------------ calls

    def _request(self, kind: str, name: str, arguments: bytes) -> CallRequest:
        self._check_not_ended()
        return CallRequest(uuid.uuid4().hex, kind, name, arguments, self._program, self._words, os.getcwd())

    def _run(self, kind: str, name: str, arguments: bytes) -> Any:
        """Make a call to the trainer's process, wait until the call has ended, and return its result.

        Args:
            kind: The kind of call, as in `CallRequest`.
            name: Name of the trainer's method or class, or the ID of the call that returned an iterator.
            arguments: The pickled arguments.
        """
        asked = self._request(kind, name, arguments)
        return self._answer(asked.token, self._actor.run.remote(asked)).result()

    @hides_library_frames
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        packed = {key: self._as_sent(key, data) for key, data in kwargs.items() if key in _DATA and data is not None}
        kwargs = {**kwargs, **packed}
        # With `blocking=False`, only this program continues at once. In the trainer's process, the call runs with
        # `blocking=True`, so that later calls wait for it.
        if name in MAY_GO_ON and not kwargs.get("blocking", True):
            asked = self._request("call", name, packed_arguments(name, args, {**kwargs, "blocking": True}))
            try:
                # Wait until the call is queued. Otherwise a later call might be queued first if Ray repeats requests.
                self._ask("begin", asked)
            except KeyboardInterrupt:
                self._actor.interrupt.remote(asked.token)
                raise
            return DetachedCall(self, asked.token, name)
        value = self._run("call", name, packed_arguments(name, args, kwargs))
        return self._drawn(value.token) if isinstance(value, RemoteIterator) else value

    def _as_sent(self, argument: str, data: Any) -> SentData:
        """Wrap a dataset that is passed to a call, so that the trainer recognizes the same object in a later call.

        Args:
            argument: Name of the argument, such as "dataset".
            data: The dataset.
        """
        known = next((each for each in self._sent if each.data is data), None)
        if known is None:
            known = SentData(argument, data)
            self._sent.append(known)
        return replace(known, argument=argument)

    def _drawn(self, token: str) -> Iterator[Any]:
        try:
            while values := self._run("draw", token, b""):
                yield values[0]
        finally:
            if not self._is_ended and session() == self._session:
                self._run("close", token, b"")

    def _answer(self, token: str, call: Any, timeout_s: float | None = None) -> CallOutcome:
        self._check_session()
        try:
            reply = self._wait(token, call, timeout_s)
        except KeyboardInterrupt:  # also raise it in the trainer's process, where it becomes the answer to the call
            self._actor.interrupt.remote(token)
            reply = self._wait(token, call, None)
        # Drop the object reference, because Ray may repeat the request while the reference exists. `confirm` below lets
        # the trainer's process delete the call, so a repeated request would run the call again.
        del call
        if reply is None:
            raise RuntimeError("Another program has the result of this call.")
        packed, num_pieces = reply
        while (self._seen or 0) < num_pieces:
            self._show(self._ask("news", token, self._seen))
        answer = unpacked_answer(packed)
        # The trainer's process now deletes the answer. If unpickling failed above, the answer stays there.
        self._actor.confirm.remote(token)
        return answer

    def _wait(self, token: str, call: Any, timeout_s: float | None) -> tuple[bytes, int] | None:
        import ray

        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        brief_s = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        # First wait only for the call. A short call ends during this wait, before any output is requested.
        with suppress(ray.exceptions.GetTimeoutError):
            return self._get(call, brief_s)
        news, knows_other = None, False
        while time.monotonic() < deadline:
            if news is None:
                news = self._actor.news.remote(token, self._seen, knows_other)
            left_s = max(0.0, min(ANSWER_S, deadline - time.monotonic()))
            ready, _ = ray.wait([call, news], timeout=left_s, fetch_local=False)
            if call in ready:
                return self._get(call)
            if news in ready:
                other, news = self._show(self._get(news)), None
                if other is not None and not knows_other:
                    logger.warning("detached trainer `%s` is busy: %s. This call waits for its turn", self._name, other)
                    knows_other = True
            elif left_s == ANSWER_S:
                logger.warning(_SILENT, self._name, self._name)
        raise TimeoutError(
            f"A call of detached trainer `{self._name}` has not ended within {timeout_s:g} s. It continues: call "
            "`result` again to wait longer."
        )

    def _show(self, news: tuple[int, list[Piece], str | None, bool]) -> str | None:
        """Print the trainer's new output.

        Args:
            news: What `TrainerProcess.news` returned.

        Returns:
            A description of the running call that this program's call is waiting for, or None.
        """
        self._seen, pieces, other, _ = news
        show(pieces)
        return other

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer's actor, wait without a time limit, and return the answer.

        Args:
            method: Name of a method of `TrainerProcess`.
            *args: Arguments of the method.
        """
        from ray.exceptions import GetTimeoutError

        self._check_session()
        asked = getattr(self._actor, method).remote(*args)
        while True:
            with suppress(GetTimeoutError):
                return self._get(asked, ANSWER_S)
            if not is_answering(self._actor):
                logger.warning(_SILENT, self._name, self._name)

    def _get(self, asked: Any, timeout_s: float | None = None) -> Any:
        """Wait for the answer of the trainer's actor to a request, and return it.

        If the trainer's process dies, Ray may restart it and repeat the request there.

        Args:
            asked: Ray's object reference to the answer.
            timeout_s: Number of seconds to wait. None to wait without a limit.

        Raises:
            TrainerLostError: The trainer's process has ended, and Ray does not restart it.
            TrainerShutdownError: This program has ended the trainer, or the Ray session of this handle has ended.
            GetTimeoutError: The answer did not arrive in time.
        """
        import ray

        try:
            return ray.get(asked, timeout=timeout_s)
        except ray.exceptions.RayActorError as error:
            self._check_not_ended()
            raise TrainerLostError(
                f"Detached trainer `{self._name}` is gone: a program has ended it, it was not needed for too long, or "
                "its process has died. Start it again, and go on from the last checkpoint with "
                f'`fit(..., resume_from="auto")` or `load`. Ray says: {str(error).partition(chr(10))[0]}'
            ) from error

    def _check_not_ended(self) -> None:
        if self._is_ended:
            raise TrainerShutdownError(f"The detached trainer `{self._name}` has been shut down: make a new one.")
        self._check_session()

    def _check_session(self) -> None:
        if session() != self._session:
            raise TrainerShutdownError(
                f"The Ray session of this handle on detached trainer `{self._name}` has ended. If its cluster still "
                f"runs, call `ray.init(address=...)` and `raysgd.attach({self._name!r})`."
            )

    # ------------------------------------------------------------------------------------------- in parallel with calls

    def _beside(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._look(name, True, packed_arguments(name, args, kwargs))

    def _look(self, name: str, is_method: bool, arguments: bytes) -> Any:
        self._check_not_ended()
        return unpacked_answer(self._ask("look", name, is_method, arguments)).result()

    def _help_on(self, name: str) -> str:
        """Return the help text of a trainer's method, or "" if `name` is an attribute. The texts are cached.

        Raises:
            AttributeError: The trainer has no such method or attribute.
        """
        self._check_not_ended()
        if name not in self._help:
            text: str | None = self._ask("help_on", name)
            if text is None:
                raise AttributeError(f"The detached trainer `{self._name}` has no attribute `{name}`.")
            self._help[name] = text
        return self._help[name]

    def _follow(self) -> None:
        """Print the trainer's output until a running call has ended. Return at once if no call is running."""
        while True:
            news = self._ask("news", None, self._seen)
            self._show(news)
            if news[3]:
                return


@hide_library_frames
class DetachedCall(CallHandle[Any]):
    """A call of a detached trainer's method, whose result can be requested later.

    The call was made with `blocking=False`, or by a program that has ended (see `DetachedTrainer.pending`).

    Attributes:
        method: Name of the trainer's method, such as "train".
    """

    def __init__(self, trainer: DetachedTrainer, token: str, method: str) -> None:
        self._trainer, self._token, self.method = trainer, token, method
        self._answer: CallOutcome | None = None

    def __repr__(self) -> str:
        try:
            return f"<{self.method}: {'ended' if self.done() else 'running'}>"
        except (TrainerLostError, TrainerShutdownError):
            return f"<{self.method} of {self._trainer!r}>"

    def done(self) -> bool:
        """Return True if the call has ended, with a result or an exception."""
        return self._answer is not None or bool(self._trainer._ask("has_ended", self._token))

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the call has ended, and return its result. Ctrl-C during the wait ends the call.

        Args:
            timeout: Number of seconds to wait. None to wait without a limit.

        Raises:
            TimeoutError: The call has not ended in time. It continues.
            RuntimeError: Another program has received the result.
            Exception: The exception that the call raised.
        """
        if self._answer is None:
            trainer = self._trainer
            self._answer = trainer._answer(self._token, trainer._actor.answer.remote(self._token), timeout)
        return self._answer.result()


def _attached(name: str) -> DetachedTrainer:
    """Return a handle to a detached trainer. Unpickling a `DetachedTrainer` calls this function."""
    import ray

    return DetachedTrainer(name, ray.get_actor(actor_name(name), NAMESPACE))


def _this_program() -> str:
    """Return a description of this program for other programs: its user, host and process ID."""
    with suppress(Exception):  # the operating system may know no name for this process's user
        return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    return f"process {os.getpid()} on {socket.gethostname()}"


def _detach(actor: Any, program: str, made_in: Any) -> None:
    """Report to the trainer's process that this program no longer needs the trainer.

    This function runs when the program's handle to the trainer is garbage-collected, or when the program exits.

    Args:
        actor: Ray's handle to the trainer's actor.
        program: ID of this program.
        made_in: The Ray session in which the handle was created. In another session, this function does nothing.
    """
    import ray

    if session() == made_in:
        with suppress(Exception):
            ray.get(actor.detach.remote(program), timeout=_DETACH_S)


def kill(name: str, actor: Any, timeout_s: float = 30.0) -> None:
    """Kill a detached trainer's actor and its workers, and wait until its name is free.

    Also delete the trainer's journal, if this host has the file.

    Args:
        name: The trainer's name.
        actor: Ray's handle to the trainer's actor.
        timeout_s: Maximum number of seconds to wait until the name is free.
    """
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + timeout_s
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    end_workers(name)  # kills workers that the trainer has not ended itself
    if hasattr(actor, "_actor_id"):
        Journal(journal_path(name, actor._actor_id.hex())).discard()


def is_answering(actor: Any) -> bool:
    """Return True if a detached trainer's process answers within `ANSWER_S`. It also answers while it runs a call."""
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(actor.has_ended.remote(""), timeout=ANSWER_S)
        return True
    return False


def find(name: str) -> Any:
    """Return Ray's handle to the actor of the detached trainer with this name, or None if there is no such trainer.

    The actor is also found while Ray is restarting its process.
    """
    import ray

    try:
        return ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return None


def actor_name(name: str) -> str:
    """Return the Ray name of the actor that contains the detached trainer `name`."""
    return f"detached:{name}"
