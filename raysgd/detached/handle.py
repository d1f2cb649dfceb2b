"""The handle to a detached trainer. It has the trainer's methods and attributes, and forwards calls to its process."""

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

from raysgd.core.engine.keeper import NAMESPACE, end_workers
from raysgd.core.engine.placement import session
from raysgd.core.engine.program_end import end_with
from raysgd.core.engine.shared.call import CallHandle
from raysgd.core.engine.shared.tracebacks import hide_library_frames, hides_library_frames
from raysgd.core.engine.worker import SentData
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
from raysgd.exceptions import TrainerLostError, TrainerShutdownError

ANSWER_S = 20.0  # a detached trainer counts as not answering if it answers no request for this long
_BRIEF_S = 0.2  # the trainer's output is fetched during a call only if the call takes longer than this
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

    It has the same methods as the trainer, which is a `TorchTrainer`, a `TFTrainer`, or a trainer of `raysgd.train`.

    Calls from all programs run one at a time. While you wait for a call, your program prints the trainer's output.
    Ctrl-C ends the call, as it does for a trainer in your program. The trainer continues if a program ends without
    `shutdown`.

    Args:
        name: The trainer's name.
        actor: Ray's handle to the trainer's actor.
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
        self._presence = actor.stay.remote(self._program)  # this request stays open as long as the program runs
        self._ask("attach", self._program, self._words, [self._presence])
        self._finalizer = end_with(self, _detach, actor, self._program, self._session)

    def pending(self) -> DetachedCall | None:
        """Return a call that was made by a program that has since ended, or None if there is no such call.

        The call may still be running. Each call is returned once. Its answer stays in the trainer's process until you
        call `result`.
        """
        found = self._ask("pending", self._program, self._given)
        if found is None:
            return None
        token, method = found
        self._given.append(token)
        return DetachedCall(self, token, method)

    def shutdown(self, force: bool = False) -> None:
        """End the trainer and its process, and free their resources. A second call does nothing.

        If any program is running a call, that call raises `TrainerShutdownError`.

        Args:
            force: True to end the workers immediately instead of letting them shut down cleanly.
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
        except RayActorError:  # the trainer has already ended
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
        self._num_calls += 1
        token = f"{self._program}-{self._num_calls}"
        return CallRequest(token, kind, name, arguments, self._program, self._words, os.getcwd())

    def _run(self, kind: str, name: str, arguments: bytes) -> Any:
        """Make a call and wait for its result."""
        asked = self._request(kind, name, arguments)
        return self._answer(asked.token, self._actor.run.remote(asked)).result()

    @hides_library_frames
    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        given = {key: self._as_sent(key, data) for key, data in kwargs.items() if key in _DATA and data is not None}
        kwargs = {**kwargs, **given}
        # the call returns here at once, but in the trainer's process it blocks
        if name in MAY_GO_ON and not kwargs.get("blocking", True):
            asked = self._request("call", name, packed_arguments(name, args, {**kwargs, "blocking": True}))
            try:
                self._ask("begin", asked)  # wait here, because Ray does not preserve the order of repeated requests
            except KeyboardInterrupt:
                self._actor.interrupt.remote(asked.token)
                raise
            return DetachedCall(self, asked.token, name)
        value = self._run("call", name, packed_arguments(name, args, kwargs))
        return self._drawn(value.token) if isinstance(value, RemoteIterator) else value

    def _as_sent(self, argument: str, data: Any) -> SentData:
        """Wrap the data of a call with an ID, so that the trainer recognizes the same object in a later call."""
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
        except KeyboardInterrupt:  # forwarded: the call raises it in the trainer's process, and its answer contains it
            self._actor.interrupt.remote(token)
            reply = self._wait(token, call, None)
        del call  # otherwise, if the reply is lost, Ray would repeat the request, although the call has been discarded
        if reply is None:
            raise RuntimeError("Another program has the result of this call.")
        packed, num_pieces = reply
        while (self._seen or 0) < num_pieces:
            self._show(self._ask("news", token, self._seen))
        answer = unpacked_answer(packed)  # if this program cannot unpickle the answer, the trainer still has it
        self._actor.confirm.remote(token)  # sent before the next call, and before the program ends
        return answer

    def _wait(self, token: str, call: Any, timeout_s: float | None) -> tuple[bytes, int] | None:
        import ray

        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        brief_s = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        # a short call finishes within this wait, which is faster than fetching output
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
            f"A call of detached trainer `{self._name}` has not ended within {timeout_s:g} s. It continues."
        )

    def _show(self, news: tuple[int, list[Piece], str | None, bool]) -> str | None:
        """Print the new output in `news`, a result of `TrainerProcess.news`.

        Returns:
            A description of another program's call that this call waits for, or None.
        """
        self._seen, pieces, other, _ = news
        show(pieces)
        return other

    def _ask(self, method: str, *args: Any) -> Any:
        """Send a request to the trainer and return the answer, however long it takes."""
        from ray.exceptions import GetTimeoutError

        self._check_session()
        asked = getattr(self._actor, method).remote(*args)
        while True:
            with suppress(GetTimeoutError):
                return self._get(asked, ANSWER_S)
            if not is_answering(self._actor):
                logger.warning(_SILENT, self._name, self._name)

    def _get(self, asked: Any, timeout_s: float | None = None) -> Any:
        """Return the trainer's answer to a request.

        If the trainer's process dies, Ray may start another process and repeat the request.

        Raises:
            TrainerLostError: The trainer's process has died and will not be restarted.
            TrainerShutdownError: This program has ended the trainer.
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

    # --------------------------------------------------------------------------------------------- in parallel to calls

    def _beside(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._look(name, True, packed_arguments(name, args, kwargs))

    def _look(self, name: str, is_method: bool, arguments: bytes) -> Any:
        self._check_not_ended()
        return unpacked_answer(self._ask("look", name, is_method, arguments)).result()

    def _help_on(self, name: str) -> str:
        """Return the help text of a trainer's method, or "" for an attribute. Results are cached."""
        self._check_not_ended()
        if name not in self._help:
            text: str | None = self._ask("help_on", name)
            if text is None:
                raise AttributeError(f"The detached trainer `{self._name}` has no attribute `{name}`.")
            self._help[name] = text
        return self._help[name]

    def _follow(self) -> None:
        """Print the output of the running call until it ends."""
        while True:
            news = self._ask("news", None, self._seen)
            self._show(news)
            if news[3]:
                return


@hide_library_frames
class DetachedCall(CallHandle[Any]):
    """A call to a detached trainer that runs in the background, or that was made by a program that has ended.

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
        """Return True if the call has finished, with a result or an error."""
        return self._answer is not None or bool(self._trainer._ask("has_ended", self._token))

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its result. Ctrl-C ends the call.

        Args:
            timeout: Number of seconds to wait; None to wait until the call has finished.

        Raises:
            TimeoutError: The call has not finished. It continues.
            Exception: The error that the call raised.
        """
        if self._answer is None:
            trainer = self._trainer
            self._answer = trainer._answer(self._token, trainer._actor.answer.remote(self._token), timeout)
        return self._answer.result()


def _attached(name: str) -> DetachedTrainer:
    """Return the handle to a trainer. A pickled handle calls this when it is unpickled."""
    import ray

    return DetachedTrainer(name, ray.get_actor(actor_name(name), NAMESPACE))


def _this_program() -> str:
    """Return this program's user, host and process ID, to describe it to other programs."""
    with suppress(Exception):  # the operating system may know no name for this process's user
        return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    return f"process {os.getpid()} on {socket.gethostname()}"


def _detach(actor: Any, program: str, made_in: Any) -> None:
    """Notify the trainer that this program no longer needs it. Runs when a handle is garbage collected or at exit."""
    import ray

    if session() == made_in:
        with suppress(Exception):
            ray.get(actor.detach.remote(program), timeout=_DETACH_S)


def kill(name: str, actor: Any, timeout_s: float = 30.0) -> None:
    """Kill a detached trainer's actor, and wait until its name is free."""
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + timeout_s
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    end_workers(name)  # in case the trainer has not ended its workers; a guard actor frees their resources
    if hasattr(actor, "_actor_id"):
        journal_path(name, actor._actor_id.hex()).unlink(missing_ok=True)


def is_answering(actor: Any) -> bool:
    """Return True if a detached trainer answers within `ANSWER_S`, even during a call."""
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(actor.has_ended.remote(""), timeout=ANSWER_S)
        return True
    return False


def find(name: str) -> Any:
    """Return a trainer's actor, even while its process restarts, or None if there is no such trainer."""
    import ray

    try:
        return ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return None


def actor_name(name: str) -> str:
    """Return the name under which Ray knows a detached trainer's actor."""
    return f"detached:{name}"
