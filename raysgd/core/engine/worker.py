"""The code that runs in a worker's process. The driver calls it through the handles of `platform`."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

from raysgd.core.cluster.call_lines import LineEnd
from raysgd.core.cluster.keeper import CallNumber
from raysgd.core.engine.shared.interface import Connection, RegroupingReplica, Replica, ReplicaFactory
from raysgd.core.engine.shared.types import (
    LOOPBACK,
    Answered,
    Failed,
    Failure,
    FailureKind,
    HeldAtStep,
    Outcome,
    Rendezvous,
    ReplicaProgress,
    StateHandover,
    StepLacksMemory,
    WorkerInfo,
    World,
)
from raysgd.core.memory import return_freed_memory
from raysgd.core.sending import cannot_import
from raysgd.core.text import log_lines
from raysgd.core.text.faults import describe_fault

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

Reply: TypeAlias = Answered | Failure
"""The reply to a call of a function on the replica."""

_NO_THREAD = 0

_RAYS_BREAKPOINT = "ray.util.rpdb.set_trace"  # Ray sets PYTHONBREAKPOINT to this value
_FOLDER = "/dev/fd"
_RAYLET = "/raylet"  # the path of the socket to Ray's node process (the raylet) ends with this


def _guarded(method: MethodT) -> MethodT:
    """Decorate a method of `WorkerProcess` so that it returns a `Failure` instead of raising an exception.

    Ray transfers return values faster than exceptions, and all survivors report a lost connection at the same time.
    """

    @wraps(method)
    def guarded(self: WorkerProcess, *args: Any, **kwargs: Any) -> Any:
        self.call_thread = threading.get_ident()
        try:
            return method(self, *args, **kwargs)
        except self._raised_by_calls as error:
            return self._failure(error)

    return cast(MethodT, guarded)


def refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Raise `BdbQuit`.

    In a worker, `breakpoint()` calls this function unless `RAY_DEBUG` is set. Ray's own function would wait for a
    debugger forever.
    """
    raise BdbQuit


class WorkerProcess:
    """Hosts one replica, in a Ray actor or, for a local worker, in the driver.

    Attributes:
        call_thread: ID of the thread that runs the current call or ran the last call. None before the first call.
            `_NO_THREAD` after a call in `attend` has ended, until the next call starts.
        number: Number of the last call that had a number. None if no call had a number.
        reply: The reply to the call with this number, for a driver that sends the call again.
    """

    def __init__(
        self, connection: Connection, num_threads: int | None, is_remote: bool = True, log_level: int | None = None
    ) -> None:
        if log_level is not None:
            log_lines.collect(log_level)
        if is_remote and "RAY_DEBUG" not in os.environ and os.environ.get("PYTHONBREAKPOINT") == _RAYS_BREAKPOINT:
            os.environ["PYTHONBREAKPOINT"] = f"{__name__}.{refuse_breakpoint.__name__}"
        self._connection = connection
        self._num_threads = num_threads
        self._is_remote = is_remote
        # User code may raise anything. But in the driver, a `KeyboardInterrupt` comes from Ctrl-C.
        self._raised_by_calls = (Exception, SystemExit, *((KeyboardInterrupt,) if is_remote else ()))
        self._world = World(rank=-1, size=0)
        self._replica: Replica | None = None
        self.call_thread: int | None = None
        self.number: CallNumber | None = None
        self.reply: Reply | None = None

    def describe(self) -> WorkerInfo:
        """Return this worker's node, process and GPUs.

        The worker answers even during a call, so this also serves as a poll.
        """
        return WorkerInfo(*node_here(), os.getpid(), _gpu_ids())

    @_guarded
    def prepare(self, initialization_hook: Callable[[], Any] | None) -> WorkerInfo:
        """Run the user's initialization hook, then import the framework.

        Return the worker's node, process and GPUs.
        """
        return self._prepare(initialization_hook)

    def _prepare(self, initialization_hook: Callable[[], Any] | None) -> WorkerInfo:
        if self._num_threads is not None:
            self._connection.limit_threads(self._num_threads)
        if initialization_hook is not None:
            initialization_hook()
        if self._is_remote:
            self._connection.load()
            gc.freeze()  # imported modules never become garbage, so collections need not visit them
            gc.enable()
        else:
            self._connection.load_in_driver()
        return self.describe()

    @_guarded
    def open_endpoint(self, host: str) -> int:
        """Leave the current group, if any, and listen for the ranks of the next group.

        Return the number of the endpoint, which contains the port. See `Connection.open_endpoint`.
        """
        # Also leave the single-rank group in which a standby worker was prepared, and a group that could not be formed.
        if self._replica is not None or self._world.size:
            self._connection.leave()
        return self._connection.open_endpoint(host)

    @_guarded
    def build(self, world: World, rendezvous: Rendezvous, make_replica: ReplicaFactory, capture: bool) -> Answered:
        """Join a group and build the replica. If the worker already has a replica, replace it.

        Args:
            world: The worker's rank, group size and so on.
            rendezvous: The addresses of all ranks.
            make_replica: Creates the replica.
            capture: True to copy the replica's state after `setup`.

        Returns:
            An answer that contains the return value of the replica's `setup`.
        """
        self._world = world
        if self._replica is not None:
            self._end_replica()
            gc.collect()  # free the old replica's memory, which the new replica may need
        self._connection.join(rendezvous, world)
        self._replica = make_replica(world)
        facts = self._replica.setup()
        if self._is_remote:
            return_freed_memory()
        return _answer(self, facts, capture)

    @_guarded
    def prepare_standby(
        self, hook: Callable[[], Any] | None, world: World, make_replica: ReplicaFactory | None
    ) -> Answered:
        """Prepare a standby worker: import the framework, then build and warm up the replica in a group of size 1.

        Args:
            hook: The user's initialization hook.
            world: The rank and group size with which to build the replica.
            make_replica: Creates the replica. None to build it only once the worker has joined a group.

        Returns:
            An answer with this worker's node, process and GPUs.
        """
        info = self._prepare(hook)
        if make_replica is not None:
            alone = Rendezvous(((LOOPBACK, self._connection.open_endpoint(LOOPBACK)),), on_one_node=True)
            self._connection.join(alone, World(rank=0, size=1), even_alone=True)
            self._replica = make_replica(world)
            self._replica.setup()
            return_freed_memory()
            self.replica.warm_up()
            self._world = World(rank=0, size=1)
        return _answer(self, info)

    @_guarded
    def leave_group(self, host: str) -> tuple[ReplicaProgress, int]:
        """Leave the group, even if it is broken, and listen at `host` for the ranks of the next group.

        Returns:
            The replica's progress, and the number of the endpoint as `open_endpoint` returns it.
        """
        self._connection.leave_for_another()
        return self.replica.replica_progress(), self._connection.open_endpoint(host)

    @_guarded
    def regroup(self, world: World, rendezvous: Rendezvous, handover: StateHandover) -> Any:
        """Join a new group and continue the training there. Return the value that the replica's `regroup` returns."""
        self._world = world
        self._connection.join(rendezvous, world, even_alone=True)
        return self.replica.regroup(world, handover)

    @_guarded
    def on_replica(self, function: Callable[..., Any], capture: bool, landed: int | None, *args: Any) -> Answered:
        """Run `function(replica, *args)`. If `capture` is True, copy the training state right after the call."""
        return _answer(self, function(self.replica, *args), capture, landed)

    @_guarded
    def on_packed(self, packed: bytes, *values: Any) -> Reply:
        """Run a call that `pack` pickled, like `on_replica`.

        If this worker has already run a call with the same number, repeat the reply to that call. This happens if the
        process of a detached trainer died during the call.

        Args:
            packed: The pickled call.
            values: The objects whose references `pack` returned separately.
        """
        try:
            function, capture, landed, args, places, number = pickle.loads(packed)
        except ModuleNotFoundError as error:
            raise cannot_import(error.name) from error
        for place, value in zip(places, values, strict=True):
            args[place] = value
        if number is not None and number == self.number:
            return cast(Reply, self.reply)
        self.number = self.number if number is None else number
        reply = WorkerProcess.on_replica(self, function, capture, landed, *args)  # see `_answer`
        if number is not None:
            self.reply = reply
        return reply

    def attend(self, name: str, packed: bytes) -> Reply | None:
        """Run a call and send the answer over a Unix socket.

        Then run the calls that arrive on the socket until it closes. This method ends early if a call fails, because
        failures are sent through Ray.

        Args:
            name: Address of the socket.
            packed: The first call, as pickled by `pack`.

        Returns:
            None, or the last answer or failure if it could not be sent over the socket.
        """
        line = LineEnd(name)
        try:
            message: bytes | None = packed
            while message is not None:
                reply = WorkerProcess.on_packed(self, message)
                # This must be set before the driver gets the answer, because the driver may then request a stack.
                self.call_thread = _NO_THREAD
                if isinstance(reply, Failure) or not line.answer(reply):
                    return reply
                message = line.next()
            return None
        finally:
            line.hang_up()

    def last_call(self) -> CallNumber | None:
        """Return the number of the last state-changing call that this worker started.

        Return None if no call had a number.

        Only a detached trainer numbers its calls. This method runs in a thread other than the one that runs calls.
        """
        return self.number

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` in the thread that runs calls.

        Errors are raised unchanged, not returned as a `Failure`.
        """
        return function(*args, **kwargs)

    def host(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(replica, *args, **kwargs)` in the thread that runs calls.

        Errors are raised unchanged, not returned as a `Failure`.
        """
        return function(self.replica, *args, **kwargs)

    def beside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(replica, *args)` in a second thread, even during a call. Return None if there is no replica."""
        replica = self._replica
        return None if replica is None else function(replica, *args)

    def send(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(replica, *args)` in a third thread. A large result then does not delay heartbeats."""
        return self.beside(function, *args)

    def relay(self, references: Sequence[Any]) -> tuple[None, Any]:
        """Copy another worker's result to the object store of this node, where it survives the loss of that worker.

        Ray treats the two return values as separate objects. The driver waits only for the first value, None, so the
        result itself is not sent to the driver.

        Args:
            references: A single reference to the result, in a list. Ray would replace a bare reference with the result.
        """
        import ray

        [value] = ray.get(list(references))
        return None, value

    def interrupt(self) -> None:
        """Interrupt the collectives in which this rank waits for other ranks.

        This method runs in a thread other than the one that runs calls.
        """
        self._connection.interrupt()

    def stack(self) -> str:
        """Return the current stack of the thread that runs calls, without the engine's frames.

        If no call is running, return a line that says so. This method runs in a thread other than the one that runs
        calls.
        """
        thread = self.call_thread
        frame = sys._current_frames().get(thread or 0)
        if frame is None:
            return "  no call was made yet\n" if thread is None else "  no call is running\n"
        frames = traceback.extract_stack(frame)
        num_ours = max((index for index, entry in enumerate(frames, start=1) if entry.filename == __file__), default=0)
        return "".join(traceback.format_list(frames[num_ours:] or frames))

    def close(self) -> None:
        """Shut down the replica and leave the group."""
        try:
            self._end_replica()
        finally:
            self._connection.leave()

    def _end_replica(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.shutdown()

    @property
    def replica(self) -> RegroupingReplica:
        """The worker's replica. Use this property only after the replica has been built.

        If it cannot regroup, it is a plain `Replica`, which the engine never asks to.
        """
        assert self._replica is not None, "the worker has no replica yet"
        return cast(RegroupingReplica, self._replica)

    def _failure(self, error: BaseException) -> Failure:
        # If the worker is alone in its group, it has no connection to other ranks. Its error then comes from user code.
        has_lost_group = self._world.is_distributed and self._connection.is_connection_error(error)
        kind: FailureKind = "disconnected" if has_lost_group else "user"
        largest_batch = None
        if isinstance(error, StepLacksMemory) and error.__cause__ is not None:
            kind, largest_batch, error = "memory", error.largest_batch, error.__cause__
        # All survivors of a failure lose connections at once, so it must be cheap to describe their errors.
        is_brief = kind != "user"
        fault = describe_fault(error, self._world.rank, node_here()[1], portable=self._is_remote, brief=is_brief)
        if kind == "memory":
            error.__traceback__ = None  # its frames refer to what takes the memory
        joint_work_of = getattr(self._replica, "joint_work_of", lambda error: None)
        failure = Failure(kind, fault, log_lines.drain(), joint_work_of(error), largest_batch)
        if kind != "user":
            self._connection.give_up(error)  # ranks that wait for this rank then notice the failure
        return failure


def _answer(process: WorkerProcess, value: Any, capture: bool = False, landed: int | None = None) -> Answered:
    """Return the answer to a call.

    If `capture` is True and the call completed, include a copy of the training state.

    This is a function rather than a method because Ray wraps each method of an actor, and users would see the wrapper's
    frames in tracebacks.
    """
    part = None
    if capture and not isinstance(value, HeldAtStep):
        began = time.perf_counter()
        part = process.replica.capture(landed)
        part = replace(part, seconds=time.perf_counter() - began)
    return Answered(process._world.rank, value, part, log_lines.drain() if process._is_remote else ())


class RaySGDWorker(WorkerProcess):
    """The code of a worker in a Ray actor.

    If Ray assigned no GPU to the actor, the node's GPUs are hidden from the process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Garbage collection takes a sixth of the time of importing the framework. A standby worker may import the
        # framework while Ray unpickles the arguments of `prepare_standby`, so collection stays off until `_prepare`.
        gc.disable()
        if not _gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        let_go_of_ray()
        super().__init__(*args, **kwargs)


def let_go_of_ray() -> None:
    """From now on, whenever this worker forks a child process, close the child's copy of the connection to Ray.

    Ray notices that a worker was killed when the worker's connection to Ray closes. A child process would keep the
    connection open. The death would then be noticed only after `heartbeat_s`.
    """
    numbers = [number for number in map(int, os.listdir(_FOLDER)) if _leads_to_ray(number)]
    os.register_at_fork(after_in_child=lambda: _drop(numbers))


def _leads_to_ray(number: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        return connection.family == socket.AF_UNIX and str(connection.getpeername()).endswith(_RAYLET)
    return False


def _drop(numbers: Sequence[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        # Ray's code still uses this file descriptor, so redirect it instead of closing it.
        os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


def node_here() -> tuple[str, str]:
    """Return the ID and address of this process's node. Without Ray, return the host name and the loopback address."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        context = ray.get_runtime_context()
        return context.get_node_id(), ray.util.get_node_ip_address()
    host = socket.gethostname()
    return host, "127.0.0.1"


def _gpu_ids() -> tuple[str, ...]:
    """Return the GPUs that Ray assigned to this process."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ()
    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))


def outcome_of(rank: int, reply: Any) -> Answered | Failed:
    """Return the outcome of a call to a worker, which has returned `reply`.

    A worker may not know its rank yet. If it failed before, add the rank to the failure.
    """
    if isinstance(reply, Failure):
        fault = reply.fault if reply.fault.rank >= 0 else replace(reply.fault, rank=rank)
        return Failed(rank, replace(reply, fault=fault))
    return replace(reply, rank=rank) if isinstance(reply, Answered) else Answered(rank, reply)


@dataclass(frozen=True)
class LocalCall:
    """A call to the worker in the driver process. It runs only when the driver gathers the ranks' answers."""

    function: Callable[[], Any]

    def run(self, rank: int) -> Outcome:
        """Run the call. If it raises an exception, the returned failure contains the live traceback, for debuggers."""
        return outcome_of(rank, self.function())
