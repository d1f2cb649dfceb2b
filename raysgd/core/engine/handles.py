"""Handles through which the driver calls workers: the worker in its own process, and workers that are Ray actors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Concatenate, ParamSpec, TypeAlias

from raysgd.core.cluster.call_lines import ARE_POSSIBLE, LARGEST, Line
from raysgd.core.cluster.keeper import CallNumber, keeper
from raysgd.core.cluster.ray_cluster import session
from raysgd.core.engine.placement import Slot
from raysgd.core.engine.shared.interface import Connection
from raysgd.core.engine.shared.types import UNKNOWN, Answered, Failed, Failure, Outcome
from raysgd.core.engine.worker import RaySGDWorker, WorkerProcess
from raysgd.core.sending import packed_bytes
from raysgd.core.text import log_lines

logger = logging.getLogger(__name__)

P = ParamSpec("P")

WorkerMethod: TypeAlias = Callable[Concatenate[WorkerProcess, P], Any]
"""A method of `WorkerProcess`, as the driver names it to a `LocalWorker` or a `RemoteWorker`."""

# Ray's concurrency groups, each with one thread, by method. Other methods run in the thread that runs calls. Methods in
# "beside" and "signs" must be fast: the driver polls workers through these two threads, and kills a worker that does
# not respond.
_GROUPS = {
    "beside": "beside",
    "stack": "beside",
    "describe": "signs",
    "interrupt": "signs",
    "last_call": "signs",
    "send": "sending",
    "relay": "sending",
}
_NUM_RETURNS = {"relay": 2}


def outcome_of(rank: int, reply: Any) -> Answered | Failed:
    """Return the outcome of a call to a worker, which has returned `reply`.

    A worker may not know its rank yet. If it failed before, add the rank to the failure.
    """
    if isinstance(reply, Failure):
        fault = reply.fault if reply.fault.rank >= 0 else replace(reply.fault, rank=rank)
        return Failed(rank, replace(reply, fault=fault))
    return replace(reply, rank=rank) if isinstance(reply, Answered) else Answered(rank, reply)


def pack(
    function: Callable[..., Any],
    capture: bool,
    landed: int | None,
    args: Sequence[Any],
    number: CallNumber | None = None,
) -> tuple[Any, ...]:
    """Pickle a call to a function on the replica.

    Return the arguments to pass to `WorkerProcess.on_packed` on a worker.

    The returned arguments can be sent to any number of workers. Ray object references in `args` are returned as
    separate arguments, so that Ray replaces them with the objects.

    Args:
        function: Called as `function(replica, *args)`.
        capture: True to copy the training state after the call.
        landed: Token of the newest snapshot that has arrived in the driver. None if no snapshot has arrived.
        args: The function's arguments.
        number: Number of the call, if the trainer is detached.
    """
    from ray import ObjectRef

    places = [place for place, arg in enumerate(args) if isinstance(arg, ObjectRef)]
    plain = [None if place in places else arg for place, arg in enumerate(args)]
    packed = packed_bytes("What the call is given", (function, capture, landed, plain, places, number))
    return packed, *(args[place] for place in places)


@dataclass(frozen=True)
class LocalCall:
    """A call to the worker in the driver process. It runs only when the driver gathers the ranks' answers."""

    function: Callable[[], Any]

    def run(self, rank: int) -> Outcome:
        """Run the call. If it raises an exception, the returned failure contains the live traceback, for debuggers."""
        return outcome_of(rank, self.function())


class LocalWorker:
    """The driver's handle to the worker in the driver process (`use_local=True`).

    A call runs only when the driver gathers the results. It then runs in the driver's thread, so that a debugger can
    stop in it.
    """

    is_local = True
    info = UNKNOWN

    def __init__(self, connection: Connection) -> None:
        # In the driver, the user decides how many threads libraries use, so no limit is set.
        self._process = WorkerProcess(connection, num_threads=None, is_remote=False)
        self._connection = connection

    def submit(self, method: WorkerMethod[P], *args: P.args, **kwargs: P.kwargs) -> LocalCall:
        """Return a `LocalCall` of the worker's method. `LocalCall.run` then runs the method."""
        return LocalCall(partial(method, self._process, *args, **kwargs))

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:
        """Make this worker use only the GPUs that are reserved for it. See `Connection.use_gpus`."""
        self._connection.use_gpus(gpu_ids)

    def interrupt(self) -> None:
        """Interrupt the collectives in which this rank waits for other ranks. May be called from another thread."""
        self._process.interrupt()

    @property
    def replica(self) -> Any:
        """The worker's replica."""
        return self._process.replica

    def kill(self) -> None:
        """Close the worker's replica. The process stays alive, because it is the driver.

        Errors are only logged, because the other workers must be stopped, too.
        """
        try:
            self._process.close()
        except Exception as error:  # user code may raise anything
            logger.warning("the worker in the driver failed to close: %r", error)


class RemoteWorker:
    """The driver's handle to a worker that is a Ray actor.

    Attributes:
        info: Node and process of the worker. `UNKNOWN` until the worker's process is known.
    """

    is_local = False
    info = UNKNOWN

    def __init__(self, slot: Slot, connection: Connection, num_threads: int | None) -> None:
        self.slot = slot
        options, kept_by = slot.reservation.actor_options(slot.index), keeper()
        if kept_by is not None:
            options |= kept_by.actor_options()
        self.name = options.get("name", "")
        self._line: Line | None = None
        self._can_attend = ARE_POSSIBLE
        self._session = session()
        self.actor = _actor_class().options(**options).remote(connection, num_threads, log_level=log_lines.level())

    def submit(self, method: WorkerMethod[P], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Start a call of one of the worker's methods. Return Ray's reference to the result.

        If the method runs in the same thread as `attend`, first close the Unix socket, so that `attend` ends.
        """
        name = method.__name__
        if name not in _GROUPS:
            self._hang_up()
            return getattr(self.actor, name).remote(*args, **kwargs)
        options = {"concurrency_group": _GROUPS[name], "num_returns": _NUM_RETURNS.get(name, 1)}
        return getattr(self.actor, name).options(**options).remote(*args, **kwargs)

    def ask(self, packed: bytes, *values: Any) -> Any:
        """Send the worker a call that `pack` has pickled. Use a Unix socket if possible, otherwise Ray.

        Return a `Line` or Ray's reference to the result.
        """
        line = self._line
        self._can_attend = self._can_attend and (line is None or line.has_answer or line.was_joined)
        if values or len(packed) > LARGEST or not self._can_attend:
            return self.submit(WorkerProcess.on_packed, packed, *values)
        if line is not None and line.has_answer and line.send(packed):
            return line
        self._hang_up()
        try:
            self._line = Line(lambda name: self.actor.attend.remote(name, packed))
        except OSError:  # raised, for example, in a sandbox or if too many files are open
            self._can_attend = False
            return self.submit(WorkerProcess.on_packed, packed)
        return self._line

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.hang_up()
            self._line = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle.

        The Unix socket to the worker is left out, because it works only in this process.
        """
        return {**vars(self), "_line": None}

    def kill(self) -> None:
        import ray

        # If the call is not answered, another thread may still be waiting for the answer.
        if self._line is not None and self._line.is_answered:
            self._hang_up()
        if session() == self._session:
            ray.kill(self.actor, no_restart=True)


@cache
def _actor_class() -> Any:
    """Return the Ray actor class of workers.

    The class is created on first use, so that Ray is imported as late as possible.
    """
    import ray

    threads = dict.fromkeys(_GROUPS.values(), 1)
    options: dict[str, Any] = {"concurrency_groups": threads, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(**options)(RaySGDWorker)
