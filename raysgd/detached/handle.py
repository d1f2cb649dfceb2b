"""The handle on a detached trainer: it has the trainer's methods and attributes, and each call goes to its process."""

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

from raysgd.detached.call_log import journal_path
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
from raysgd.engine.keeper import NAMESPACE, end_workers
from raysgd.engine.placement import session
from raysgd.engine.program_end import end_with
from raysgd.engine.shared.call import CallHandle
from raysgd.engine.shared.tracebacks import hide_library_frames, hides_library_frames
from raysgd.engine.worker import SentData
from raysgd.exceptions import TrainerLostError, TrainerShutdownError

ANSWER_S = 20.0  # a detached trainer that answers nothing for so long is not answering, whatever was asked
_BRIEF_S = 0.2  # a call that takes no longer needs no news
_DETACH_S = 1.0
_DATA = ("dataset", "validation_dataset")
_NUM_KNOWN_DATA = 4
_NO_ARGUMENTS = pickle.dumps(((), {}))

_SILENT = (
    "detached trainer `%s` is not answering: its process is stopped, busy or starting. `raysgd stop %s --force` ends it"
)

logger = logging.getLogger(__name__)


class DetachedTrainer:
    """A trainer that lives in its own process, with the methods of `TorchTrainer`, `TFTrainer` or `train.Trainer`.

    Calls of all programs take turns. What the trainer prints appears here while you wait for a call. Ctrl-C ends the
    call, as it ends one of a trainer in your program. A program that ends without `shutdown` leaves the trainer
    running.

    Args:
        name: Its name.
        actor: Ray's handle on it.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self._actor, self._session = name, actor, session()
        self._program, self._words = uuid.uuid4().hex, _this_program()
        self._num_calls = 0
        self._given: list[str] = []
        self._seen: int | None = None
        self._help: dict[str, str] = {}
        self._sent: deque[SentData] = deque(maxlen=_NUM_KNOWN_DATA)
        self._is_ended = False
        self._presence = actor.stay.remote(self._program)  # has no answer while this program lives
        self._ask("attach", self._program, self._words, [self._presence])
        self._finalizer = end_with(self, _detach, actor, self._program, self._session)

    def pending(self) -> DetachedCall | None:
        """Return a call of a program that is gone, running or ended; None if there is none.

        Each is given out once. Its answer stays in the trainer's process until `result` has it.
        """
        found = self._ask("pending", self._program, self._given)
        if found is None:
            return None
        token, method = found
        self._given.append(token)
        return DetachedCall(self, token, method)

    def shutdown(self, force: bool = False) -> None:
        """End the trainer and its process, and give their resources back; a second time it does nothing.

        A call that runs is ended, too, whichever program has made it. It raises `TrainerShutdownError`.

        Args:
            force: End the workers at once instead of letting them close first.
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
        except RayActorError:  # it has ended by itself
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
        with suppress(TrainerLostError, TrainerShutdownError):  # a notebook then shows what `repr` returns
            return self._look("_repr_html_", True, _NO_ARGUMENTS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._name,)

    # ------------------------------------------------------------------------------------------------------- calls

    def _request(self, kind: str, name: str, arguments: bytes) -> CallRequest:
        self._check_not_ended()
        self._num_calls += 1
        token = f"{self._program}-{self._num_calls}"
        return CallRequest(token, kind, name, arguments, self._program, self._words, os.getcwd())

    def _run(self, kind: str, name: str, arguments: bytes) -> Any:
        """Make a call and wait for it."""
        asked = self._request(kind, name, arguments)
        return self._answer(asked.token, self._actor.run.remote(asked)).result()

    @hides_library_frames
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        given = {key: self._as_sent(key, data) for key, data in kwargs.items() if key in _DATA and data is not None}
        kwargs = {**kwargs, **given}
        if name in MAY_GO_ON and not kwargs.get("blocking", True):  # there it blocks: that is its turn
            asked = self._request("call", name, packed_arguments(name, args, {**kwargs, "blocking": True}))
            try:
                self._ask("begin", asked)  # waits, as Ray does not keep the order of what it asks again
            except KeyboardInterrupt:
                self._actor.interrupt.remote(asked.token)
                raise
            return DetachedCall(self, asked.token, name)
        value = self._run("call", name, packed_arguments(name, args, kwargs))
        return self._drawn(value.token) if isinstance(value, RemoteIterator) else value

    def _as_sent(self, argument: str, data: Any) -> SentData:
        """Return data of a call so that the trainer knows them again in a later call with the same object."""
        known = next((each for each in self._sent if each.data is data), None)
        if known is None:
            known = SentData(argument, data)
            self._sent.append(known)
        return replace(known, argument=argument)

    def _drawn(self, token: str) -> Iterator[Any]:
        try:
            while found := self._run("draw", token, b""):
                yield found[0]
        finally:
            if not self._is_ended and session() == self._session:
                self._run("close", token, b"")

    def _answer(self, token: str, call: Any, timeout_s: float | None = None) -> CallOutcome:
        self._check_session()
        try:
            reply = self._wait(token, call, timeout_s)
        except KeyboardInterrupt:  # the call raises it, in this process of the trainer or in the next one
            self._actor.interrupt.remote(token)
            reply = self._wait(token, call, None)
        del call  # for Ray would ask again to have a lost reply back, and the trainer's process soon forgets the call
        if reply is None:
            raise RuntimeError("Another program has the result of this call.")
        packed, num_pieces = reply
        while (self._seen or 0) < num_pieces:
            self._show(self._ask("news", token, self._seen))
        answer = unpacked_answer(packed)  # it stays in the trainer's process if this program cannot read it
        self._actor.confirm.remote(token)  # is on its way before the next call, and before the program ends
        return answer

    def _wait(self, token: str, call: Any, timeout_s: float | None) -> tuple[bytes, int] | None:
        import ray

        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        brief_s = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        with suppress(ray.exceptions.GetTimeoutError):  # one look, and not a `wait` before it
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
            f"A call of detached trainer `{self._name}` has not ended within {timeout_s:g} s. It continues."
        )

    def _show(self, news: tuple[int, list[Piece], str | None, bool]) -> str | None:
        """Print what is new; return the call of another program that this one waits for."""
        self._seen, pieces, other, _ = news
        show(pieces)
        return other

    def _ask(self, method: str, *args: Any) -> Any:
        """Return what the trainer answers."""
        from ray.exceptions import GetTimeoutError

        self._check_session()
        asked = getattr(self._actor, method).remote(*args)
        while True:
            with suppress(GetTimeoutError):
                return self._get(asked, ANSWER_S)
            if not is_answering(self._actor):
                logger.warning(_SILENT, self._name, self._name)

    def _get(self, asked: Any, timeout_s: float | None = None) -> Any:
        """Return an answer of the trainer. If its process dies meanwhile, Ray starts the next one and asks that.

        Raises:
            TrainerLostError: There is no next one.
            TrainerShutdownError: This program has ended the trainer.
            GetTimeoutError: There is no answer yet.
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

    # ------------------------------------------------------------------------------------------- beside the calls

    def _beside(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._look(name, True, packed_arguments(name, args, kwargs))

    def _look(self, name: str, is_method: bool, arguments: bytes) -> Any:
        self._check_not_ended()
        return unpacked_answer(self._ask("look", name, is_method, arguments)).result()

    def _help_on(self, name: str) -> str:
        """Return the help on a method of the trainer, of whatever class that is; "" for an attribute. Asks once."""
        self._check_not_ended()
        if name not in self._help:
            text: str | None = self._ask("help_on", name)
            if text is None:
                raise AttributeError(f"The detached trainer `{self._name}` has no attribute `{name}`.")
            self._help[name] = text
        return self._help[name]

    def _follow(self) -> None:
        """Show the output of the call that is running, until it ends."""
        while True:
            news = self._ask("news", None, self._seen)
            self._show(news)
            if news[3]:
                return


@hide_library_frames
class DetachedCall(CallHandle[Any]):
    """A call that its program does not wait for, or cannot wait for any more.

    Attributes:
        method: The method of the trainer, such as "train".
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
        """Return whether the call has ended, with a result or an error."""
        return self._answer is not None or bool(self._trainer._ask("has_ended", self._token))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return what it came to. Ctrl-C ends the call, as it would have in its program.

        Args:
            timeout: How many seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It goes on.
            Exception: What the call itself has raised.
        """
        if self._answer is None:
            trainer = self._trainer
            self._answer = trainer._answer(self._token, trainer._actor.answer.remote(self._token), timeout)
        return self._answer.result()


def _attached(name: str) -> DetachedTrainer:
    """Return the handle of another process."""
    import ray

    return DetachedTrainer(name, ray.get_actor(actor_name(name), NAMESPACE))


def _this_program() -> str:
    """Return who and where this program is, for other programs."""
    with suppress(Exception):  # a user without a name
        return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    return f"process {os.getpid()} on {socket.gethostname()}"


def _detach(actor: Any, program: str, made_in: Any) -> None:
    """Tell the trainer that a handle is gone, also at the end of a program: what it said before has then arrived."""
    import ray

    if session() == made_in:
        with suppress(Exception):
            ray.get(actor.detach.remote(program), timeout=_DETACH_S)


def kill(name: str, actor: Any, timeout_s: float = 30.0) -> None:
    """End a detached trainer, whatever its process does, and wait until its name is free."""
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + timeout_s
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    end_workers(name)  # if it has not done so: its guard gives their resources back
    if hasattr(actor, "_actor_id"):
        journal_path(name, actor._actor_id.hex()).unlink(missing_ok=True)


def is_answering(actor: Any) -> bool:
    """Return whether a detached trainer answers in time, whatever it does."""
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(actor.has_ended.remote(""), timeout=ANSWER_S)
        return True
    return False


def find(name: str) -> Any:
    """Return the actor of a trainer, also of one whose process is being started again; None where there is none."""
    import ray

    try:
        return ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return None


def actor_name(name: str) -> str:
    """Return the name of a detached trainer among Ray's actors."""
    return f"detached:{name}"
