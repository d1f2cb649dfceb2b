"""The handle on a trainer in a host: it has the trainer's methods and attributes, and each call goes to the host."""

from __future__ import annotations

import getpass
import logging
import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any
from weakref import finalize

from raysgd.engine.processes.outliving import NAMESPACE, end_workers
from raysgd.engine.processes.resources import session
from raysgd.engine.shared.call_handle import CallHandle
from raysgd.exceptions import HostLostError, TrainerShutdownError
from raysgd.host import output
from raysgd.host.interface import BESIDE, MAY_GO_ON, STAYS_THERE
from raysgd.host.journal import journal_path
from raysgd.host.packing import CallOutcome, RemoteIterator, packed_arguments, unpacked_answer
from raysgd.host.process import CallRequest

_RESTART_S = 120.0
_BRIEF_S = 0.2  # a call that takes no longer needs no news
_DETACH_S = 1.0
_LOOK_S = 0.05
_NO_ARGUMENTS = pickle.dumps(((), {}))

logger = logging.getLogger(__name__)


class HostedTrainer:
    """A trainer that lives in a host, with the methods of `TorchTrainer`, `TFTrainer` or `train.Trainer`.

    Calls of all programs take turns. What the trainer prints appears here while you wait for a call. Ctrl-C ends the
    call in the host, as it ends one of a trainer in your program. A program that ends without `shutdown` leaves the
    trainer running.

    Args:
        name: The name of the host.
        actor: Ray's handle on it.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self._actor, self._session = name, actor, session()
        self._program, self._words = uuid.uuid4().hex, _this_program()
        self._num_calls = 0
        self._seen: int | None = None
        self._are_methods: dict[str, bool] = {}
        self._is_ended = False
        self._ask("attach", *self._attaching())
        self._finalizer = finalize(self, _detach, actor, self._program, self._session)

    def _attaching(self) -> tuple[str, str, list[Any]]:
        """Return what `attach` of the host takes."""
        self._presence = self._actor.stay.remote(self._program)
        return self._program, self._words, [self._presence]

    def pending(self) -> HostedCall | None:
        """Return a call of a program that is gone, running or ended; None if there is none.

        Each is given out once. Its answer stays in the host until `result` has it.
        """
        found = self._ask("pending", self._program)
        if found is None:
            return None
        token, method = found
        return HostedCall(self, token, method, lambda: self._actor.answer.remote(token))

    def shutdown(self, force: bool = False) -> None:
        """End the trainer and its host, and give their resources back; a second time it does nothing.

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
                "host `%s` is not shut down from here: the Ray session of this handle has ended. If its cluster still "
                "runs, use `raysgd.attach(%r).shutdown()`",
                self._name,
                self._name,
            )
            return
        try:
            answer = unpacked_answer(ray.get(self._actor.end.remote(force)))
        except RayActorError:  # it has ended by itself
            answer = CallOutcome()
        finally:
            self._is_ended = True
            self._finalizer.detach()
            kill(self._name, self._actor)
        answer.result()

    def __enter__(self) -> HostedTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=error is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
        if name in STAYS_THERE:
            raise AttributeError(f"`{name}` of a trainer in a host: {STAYS_THERE[name]}")
        if name in BESIDE:
            return partial(self._beside, name)
        return partial(self._call, name) if self._is_method(name) else self._look(name, False, _NO_ARGUMENTS)

    def __repr__(self) -> str:
        if session() != self._session:
            return f"<host {self._name}: its Ray session has ended>"
        try:
            known = self._ask("describe")
        except (HostLostError, TrainerShutdownError):
            return f"<host {self._name}: ended>"
        return f"<host {self._name}: {known['trainer']}>"

    def _repr_html_(self) -> Any:
        return None if self._is_ended else self._look("_repr_html_", True, _NO_ARGUMENTS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._name,)

    # ------------------------------------------------------------------------------------------------------- calls

    def _make(self, kind: str, name: str, arguments: bytes) -> tuple[str, Callable[[], Any]]:
        """Make a call; return its token, and what asks for it: the host runs it once, however often it is asked."""
        self._num_calls += 1
        token = f"{self._program}-{self._num_calls}"
        asked = CallRequest(token, kind, name, arguments, self._program, self._words, os.getcwd())
        self._check_not_ended()
        return token, lambda: self._actor.run.remote(asked)

    def _begin(self, kind: str, name: str, arguments: bytes) -> Any:
        """Make a call and wait for it."""
        return self._answer(*self._make(kind, name, arguments)).result()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in MAY_GO_ON and not kwargs.get("blocking", True):  # in the host it blocks: that is its turn
            token, ask = self._make("call", name, packed_arguments(name, args, {**kwargs, "blocking": True}))
            ask()
            return HostedCall(self, token, name, ask)
        value = self._begin("call", name, packed_arguments(name, args, kwargs))
        return self._drawn(value.token) if isinstance(value, RemoteIterator) else value

    def _drawn(self, token: str) -> Iterator[Any]:
        try:
            while found := self._begin("draw", token, b""):
                yield found[0]
        finally:
            if not self._is_ended and session() == self._session:
                self._begin("close", token, b"")

    def _answer(self, token: str, ask: Callable[[], Any], timeout_s: float | None = None) -> CallOutcome:
        from ray.exceptions import RayActorError

        self._check_session()
        while True:
            call = ask()
            try:
                packed, num_pieces = self._wait(token, call, timeout_s)
            except KeyboardInterrupt:
                self._actor.interrupt.remote(token)
                packed, num_pieces = self._reply(call)
            except RayActorError as error:
                self._await_restart(error)
                continue
            break
        while (self._seen or 0) < num_pieces:
            self._show(self._ask("news", token, self._seen))
        answer = unpacked_answer(packed)  # it stays in the host if this program cannot read it
        self._actor.confirm.remote(token)  # is on its way before the next call, and before the program ends
        return answer

    def _wait(self, token: str, call: Any, timeout_s: float | None) -> tuple[bytes, int]:
        import ray

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        brief_s = _BRIEF_S if timeout_s is None else min(_BRIEF_S, timeout_s)
        with suppress(ray.exceptions.GetTimeoutError):  # one look, and not a `wait` before it
            return self._reply(call, brief_s)
        done: list[Any] = []
        knows_other = False
        while not done:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"A call in host `{self._name}` has not ended within {timeout_s:g} s. It continues.")
            news = self._actor.news.remote(token, self._seen, knows_other)
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait([call, news], timeout=left_s, fetch_local=False)
            done = [each for each in ready if each == call]
            if news in ready and not done:
                other = self._show(ray.get(news))
                if other is not None and not knows_other:
                    logger.warning("host `%s` is busy: %s. This call waits for its turn", self._name, other)
                    knows_other = True
        return self._reply(call)

    def _reply(self, call: Any, timeout_s: float | None = None) -> tuple[bytes, int]:
        import ray

        reply: tuple[bytes, int] | None = ray.get(call, timeout=timeout_s)
        if reply is None:
            raise RuntimeError("Another program has the result of this call.")
        return reply

    def _show(self, news: tuple[int, list[output.Piece], str | None, bool]) -> str | None:
        """Print what is new; return the call of another program that this one waits for."""
        self._seen, pieces, other, _ = news
        output.show(pieces)
        return other

    def _ask(self, method: str, *args: Any) -> Any:
        """Return what the host answers, also where its process has to be started again for that."""
        import ray
        from ray.exceptions import RayActorError

        self._check_session()
        while True:
            try:
                return ray.get(getattr(self._actor, method).remote(*args))
            except RayActorError as error:
                self._await_restart(error)

    def _await_restart(self, error: Exception) -> None:
        """Wait until the process of the host has been started again, and attach to it.

        Raises:
            HostLostError: It is not started again.
            TrainerShutdownError: This program has ended the trainer.
        """
        import ray
        from ray.exceptions import RayActorError

        self._check_not_ended()
        deadline = time.monotonic() + _RESTART_S
        while is_there(self._name) and time.monotonic() < deadline:
            try:
                ray.get(self._actor.attach.remote(*self._attaching()))
            except RayActorError:
                time.sleep(_LOOK_S)
            else:
                self._seen = None  # it counts what it prints from 0
                return
        raise HostLostError(
            f"Host `{self._name}` is gone: a program has ended it, it was not needed for too long, or its process "
            'has died. Start it again, and go on from the last checkpoint with `fit(..., resume_from="auto")` or '
            f"`load`. Ray says: {str(error).partition(chr(10))[0]}"
        ) from error

    def _check_not_ended(self) -> None:
        if self._is_ended:
            raise TrainerShutdownError(f"The trainer in host `{self._name}` has been shut down: make a new one.")
        self._check_session()

    def _check_session(self) -> None:
        if session() != self._session:
            raise TrainerShutdownError(
                f"The Ray session of this handle on host `{self._name}` has ended. If its cluster still runs, call "
                f"`ray.init(address=...)` and `raysgd.attach({self._name!r})`."
            )

    # ------------------------------------------------------------------------------------------- beside the calls

    def _beside(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._look(name, True, packed_arguments(name, args, kwargs))

    def _look(self, name: str, is_method: bool, arguments: bytes) -> Any:
        self._check_not_ended()
        return unpacked_answer(self._ask("look", name, is_method, arguments)).result()

    def _is_method(self, name: str) -> bool:
        """Return whether a name of the trainer, of whatever class that is, is a method of it. Asks once for each."""
        self._check_not_ended()
        if name not in self._are_methods:
            is_method: bool | None = self._ask("is_method", name)
            if is_method is None:
                raise AttributeError(f"The trainer in host `{self._name}` has no attribute `{name}`.")
            self._are_methods[name] = is_method
        return self._are_methods[name]

    def _follow(self) -> None:
        """Show the output of the call that is running, until it ends."""
        while True:
            news = self._ask("news", None, self._seen)
            self._show(news)
            if news[3]:
                return


class HostedCall(CallHandle[Any]):
    """A call that its program does not wait for, or cannot wait for any more.

    Attributes:
        method: The method of the trainer, such as "train".
    """

    def __init__(self, trainer: HostedTrainer, token: str, method: str, ask: Callable[[], Any]) -> None:
        self._trainer, self._token, self.method, self._ask = trainer, token, method, ask
        self._answer: CallOutcome | None = None

    def __repr__(self) -> str:
        return f"<{self.method}: {'ended' if self.done() else 'running'}>"

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
            self._answer = self._trainer._answer(self._token, self._ask, timeout)
        return self._answer.result()


def _attached(name: str) -> HostedTrainer:
    """Return the handle of another process."""
    import ray

    return HostedTrainer(name, ray.get_actor(actor_name(name), NAMESPACE))


def _this_program() -> str:
    """Return who and where this program is, for other programs."""
    with suppress(Exception):  # a user without a name
        return f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    return f"process {os.getpid()} on {socket.gethostname()}"


def _detach(actor: Any, program: str, made_in: Any) -> None:
    """Tells the host that a handle is gone, also at the end of a program: what it said before has then arrived."""
    import ray

    if session() == made_in:
        with suppress(Exception):
            ray.get(actor.detach.remote(program), timeout=_DETACH_S)


def kill(name: str, actor: Any, timeout_s: float = 30.0) -> None:
    """End a host, whatever its process does, and wait until its name is free."""
    import ray

    ray.kill(actor)
    deadline = time.monotonic() + timeout_s
    while is_there(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    end_workers(name)  # if it has not done so: its guard gives their resources back
    journal_path(name, actor._actor_id.hex()).unlink(missing_ok=True)


def is_there(name: str) -> bool:
    """Return whether there is a host of this name, also one whose process is being started again."""
    import ray

    try:
        ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return False
    return True


def actor_name(name: str) -> str:
    """Return the name of a host among Ray's actors."""
    return f"host:{name}"
