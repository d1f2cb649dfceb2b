"""Workers: the code that runs in a worker's process, and the handles through which the driver calls workers."""

from __future__ import annotations

import gc
import logging
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
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

from raysgd.core.cluster.call_lines import ARE_POSSIBLE, LARGEST, Line, LineEnd
from raysgd.core.cluster.keeper import CallNumber, keeper
from raysgd.core.cluster.ray_cluster import session
from raysgd.core.engine.placement import Slot
from raysgd.core.engine.shared.interface import Capture, Connection, Replica, ReplicaFactory
from raysgd.core.engine.shared.types import (
    LOOPBACK,
    UNKNOWN,
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
from raysgd.core.sending import cannot_import, packed_bytes
from raysgd.core.text import log_lines
from raysgd.core.text.faults import describe_fault
from raysgd.core.text.log_lines import WorkerLogLine

logger = logging.getLogger(__name__)

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
P = ParamSpec("P")

_RAYS_BREAKPOINT = "ray.util.rpdb.set_trace"  # Ray sets PYTHONBREAKPOINT to this value
_FOLDER = "/dev/fd"
_RAYLET = "/raylet"  # the path of the socket to Ray's node process (the raylet) ends with this


@dataclass(frozen=True)
class WorkerAnswer:
    """A worker's answer to a call.

    Attributes:
        value: What the call returned.
        capture: This rank's part of a snapshot, if one was requested.
        notes: Lines that the worker logged since its last answer.
    """

    value: Any
    capture: Capture | None = None
    notes: tuple[WorkerLogLine, ...] = ()


def outcome_of(rank: int, reply: Any) -> Answered | Failed:
    """Return the outcome of a call to a worker, which has returned `reply`.

    If the worker failed before it got its rank, add the rank to the failure.
    """
    if not isinstance(reply, Failure):
        return Answered(rank, reply)
    fault = reply.fault if reply.fault.rank >= 0 else replace(reply.fault, rank=rank)
    return Failed(rank, replace(reply, fault=fault))


def notes_of(outcome: Outcome) -> tuple[WorkerLogLine, ...]:
    """Return the log lines that a worker sent with the outcome of its call."""
    if isinstance(outcome, Failed):
        return outcome.failure.notes
    if isinstance(outcome, Answered) and isinstance(outcome.value, WorkerAnswer):
        return outcome.value.notes
    return ()


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


def _answer(process: WorkerProcess, value: Any, capture: bool, landed: int | None) -> WorkerAnswer:
    """Return the answer to a call.

    If `capture` is True and the call completed, include a copy of the training state.
    """
    part = None
    if capture and not isinstance(value, HeldAtStep):
        began = time.perf_counter()
        part = cast(Replica, process._replica).capture(landed)
        part = replace(part, seconds=time.perf_counter() - began)
    return WorkerAnswer(value, part, log_lines.drain() if process._is_remote else ())


def _guarded(method: MethodT) -> MethodT:
    """Decorate a method of `WorkerProcess` so that it returns a `Failure` instead of raising an exception.

    Ray transfers return values faster than exceptions, and all survivors report a lost connection at the same time.
    """

    @wraps(method)
    def guarded(self: WorkerProcess, *args: Any, **kwargs: Any) -> Any:
        self.call_thread = threading.get_ident()
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:  # user code may raise anything, even SystemExit
            if not self._is_from_call(error):
                raise
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
        self._world = World(rank=-1, size=0)
        self._replica: Replica | None = None
        self.call_thread: int | None = None
        self.number: CallNumber | None = None
        self.reply: WorkerAnswer | Failure | None = None

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
    def build(self, world: World, rendezvous: Rendezvous, make_replica: ReplicaFactory, capture: bool) -> WorkerAnswer:
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
        return _answer(self, facts, capture, None)

    @_guarded
    def prepare_standby(
        self, hook: Callable[[], Any] | None, world: World, make_replica: ReplicaFactory | None
    ) -> WorkerAnswer:
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
            replica: Any = make_replica(world)
            self._replica = replica
            replica.setup()
            return_freed_memory()
            replica.warm_up()
            self._world = World(rank=0, size=1)
        return WorkerAnswer(info, notes=log_lines.drain())

    @_guarded
    def leave_group(self, host: str) -> tuple[ReplicaProgress, int]:
        """Leave the group, even if it is broken, and listen at `host` for the ranks of the next group.

        Returns:
            The replica's progress, and the number of the endpoint as `open_endpoint` returns it.
        """
        connection, replica = self._connection, self.replica
        connection.leave_for_another()
        progress: ReplicaProgress = cast(Any, replica).replica_progress()
        return progress, connection.open_endpoint(host)

    @_guarded
    def regroup(self, world: World, rendezvous: Rendezvous, handover: StateHandover) -> Any:
        """Join a new group and continue the training there. Return the value that the replica's `regroup` returns."""
        self._world = world
        self._connection.join(rendezvous, world, even_alone=True)
        replica: Any = self.replica
        return replica.regroup(world, handover)

    @_guarded
    def on_replica(self, function: Callable[..., Any], capture: bool, landed: int | None, *args: Any) -> WorkerAnswer:
        """Run `function(replica, *args)`. If `capture` is True, copy the training state right after the call."""
        return _answer(self, function(self.replica, *args), capture, landed)

    def on_packed(self, packed: bytes, *values: Any) -> WorkerAnswer | Failure:
        """Run a call that `pack` pickled, and return the answer. If the call raised an exception, return the failure.

        If this worker has already run a call with the same number, repeat the reply to that call. This happens if the
        process of a detached trainer died during the call.

        Args:
            packed: The pickled call.
            values: The objects whose references `pack` returned separately.
        """
        return _reply_of(self, packed, values)

    def attend(self, name: str, packed: bytes) -> WorkerAnswer | Failure | None:
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
                reply = _reply_of(self, message)
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
    def replica(self) -> Replica:
        """The worker's replica. Use this property only after the replica has been built."""
        assert self._replica is not None, "the worker has no replica yet"
        return self._replica

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

    def _is_from_call(self, error: BaseException) -> bool:
        """Return True if an error was raised by the call.

        In the driver, a `KeyboardInterrupt` comes from Ctrl-C instead.
        """
        return isinstance(error, (Exception, SystemExit, *((KeyboardInterrupt,) if self._is_remote else ())))


def _reply_of(process: WorkerProcess, packed: bytes, values: Sequence[Any] = ()) -> WorkerAnswer | Failure:
    """Run a call that `pack` pickled, and return the answer. If the call raised an exception, return the failure.

    This is a function rather than a method because Ray wraps each method of an actor, and users would see the wrapper's
    frames in tracebacks.
    """
    number = None
    process.call_thread = threading.get_ident()
    try:
        try:
            function, capture, landed, args, places, number = pickle.loads(packed)
        except ModuleNotFoundError as error:
            raise cannot_import(error.name) from error
        for place, value in zip(places, values, strict=True):
            args[place] = value
        if number is not None and number == process.number:
            reply: Any = process.reply
        else:
            process.number = process.number if number is None else number
            reply = _answer(process, function(process.replica, *args), capture, landed)
    except BaseException as error:  # user code may raise anything, even SystemExit
        if not process._is_from_call(error):
            raise
        reply = process._failure(error)
    if number is not None:
        process.reply = reply
    return cast("WorkerAnswer | Failure", reply)


@dataclass(frozen=True)
class LocalCall:
    """A call to the worker in the driver process. It runs only when the driver gathers the ranks' answers."""

    function: Callable[[], Any]

    def run(self, rank: int) -> Outcome:
        """Run the call. If it raises an exception, the returned failure contains the live traceback, for debuggers."""
        return outcome_of(rank, self.function())


WorkerMethod: TypeAlias = Callable[Concatenate[WorkerProcess, P], Any]
"""A method of `WorkerProcess`, as the driver names it to a `LocalWorker` or a `RemoteWorker`."""


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
        if method.__name__ not in _BESIDE:
            self._hang_up()
        return getattr(self.actor, method.__name__).remote(*args, **kwargs)

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


class _HostedProcess(WorkerProcess):
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


# Each of these Ray concurrency groups runs its methods in one thread. Methods in "beside" and "signs" must be fast: the
# driver polls workers through these two threads, and kills a worker that does not respond.
_GROUPS = {
    "beside": ("beside", "stack"),
    "signs": ("describe", "interrupt", "last_call"),
    "sending": ("send", "relay"),
}
_NUM_RETURNS = {"relay": 2}
_NO_THREAD = 0
_BESIDE = {name for names in _GROUPS.values() for name in names}


def _actor_class() -> Any:
    """Return the Ray actor class of workers.

    The class is created on first use, so that Ray is imported as late as possible.
    """
    global _ACTOR_CLASS
    if _ACTOR_CLASS is None:
        import ray

        members = {
            name: ray.method(concurrency_group=group, num_returns=_NUM_RETURNS.get(name, 1))(_forwarding(name))
            for group, names in _GROUPS.items()
            for name in names
        }
        hosted = type("RaySGDWorker", (_HostedProcess,), members)
        threads = dict.fromkeys(_GROUPS, 1)
        options: dict[str, Any] = {"concurrency_groups": threads, "max_restarts": 0, "max_task_retries": 0}
        _ACTOR_CLASS = ray.remote(**options)(hosted)
    return _ACTOR_CLASS


def _forwarding(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of `WorkerProcess`.

    `ray.method` adds attributes to the function that it receives. With such a separate function, `WorkerProcess` itself
    stays unchanged.
    """

    def method(self: WorkerProcess, *args: Any) -> Any:
        return getattr(WorkerProcess, name)(self, *args)

    return method


_ACTOR_CLASS: Any = None


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
