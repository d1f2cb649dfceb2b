"""How the driver reaches workers through Ray: handles to workers, and `Platform` for all else that the engine asks.

Tests replace `Platform` with a simulation. ADR 131 explains why all uses of Ray go through one class.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Concatenate, ParamSpec, TypeAlias

from raysgd.core.cluster import call_lines, ray_cluster
from raysgd.core.cluster.call_lines import ARE_POSSIBLE, LARGEST, Line, Reference
from raysgd.core.cluster.keeper import CallNumber, keeper
from raysgd.core.cluster.ray_cluster import RayThread, session
from raysgd.core.engine import transfers
from raysgd.core.engine.placement import Reservation, Slot
from raysgd.core.engine.shared.interface import Connection
from raysgd.core.engine.shared.types import UNKNOWN, Failed, Failure, Outcome, Unanswered, WorkerInfo
from raysgd.core.engine.worker import LocalCall, RaySGDWorker, WorkerProcess, node_here, outcome_of
from raysgd.core.private_names import find_name
from raysgd.core.sending import cannot_import, packed_bytes
from raysgd.core.text import log_lines
from raysgd.exceptions import WorkerFault

logger = logging.getLogger(__name__)

P = ParamSpec("P")

_TOGETHER_S = 0.01  # how long to wait for all calls before waiting for any call: one query for many answers is faster
# With more than 200 calls, the wait is longer: this many seconds per call. With one query for each answer, the total
# time of the queries would be quadratic in the number of calls.
_TOGETHER_S_EACH = 0.00005
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")

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


class Platform:
    """Starts and kills worker processes, reserves resources, transfers values, and waits for remote calls."""

    make_reservation: Callable[..., Reservation] = Reservation
    """Creates a reservation of resources. Takes the arguments of `Reservation`."""
    ensure_running = staticmethod(ray_cluster.ensure_ray)
    """Connects to a cluster, or starts one."""
    transfer = staticmethod(transfers.transfer)
    """Returns a `Transfer`, which receives a call's result."""
    store = staticmethod(transfers.store)
    """Stores one copy of a value that all workers can read."""
    view = staticmethod(ray_cluster.cluster_view)
    """Returns the state of the cluster."""
    living_nodes = staticmethod(ray_cluster.living_nodes)
    """Returns the IDs of the nodes that Ray reports as alive."""
    is_head_gone = staticmethod(ray_cluster.is_head_gone)
    """Returns True if the cluster's head node refuses connections."""
    now = staticmethod(time.monotonic)
    """Returns seconds of a monotonic clock."""
    sleep = staticmethod(time.sleep)
    """Sleeps for a number of seconds."""
    make_event = threading.Event
    """Creates a `threading.Event`."""
    make_condition = threading.Condition
    """Creates a condition variable, with a reentrant lock, for the driver's threads."""

    @property
    def home(self) -> str:
        """ID of the driver's node."""
        return node_here()[0]

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        """Start a worker process in a slot, without waiting for the process."""
        return RemoteWorker(slot, connection, num_threads)

    def new_local_worker(self, connection: Connection) -> LocalWorker:
        """Return a worker that runs in this process."""
        return LocalWorker(copy.deepcopy(connection))  # copied, because the original is pickled for the other workers

    def begin_thread(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` in a new thread. Return a function that joins the thread."""
        thread = RayThread(target=body, name="raysgd-listener", daemon=True)
        thread.start()
        return thread.join

    def find_process(self, worker: RemoteWorker) -> WorkerInfo | None:
        """Return the node and process ID of a worker that has not answered yet.

        Return None if the worker's process is not running yet.

        This method uses a private query of Ray. If Ray lacks the query, this method returns None.
        """
        actors, identity = find_name("ray._private.state:actors"), getattr(worker.actor, "_actor_id", None)
        if actors is None or identity is None:
            return None
        entry: Any = ray_cluster.ask_head(lambda: actors(identity.hex()), {})
        pid, place = entry.get("Pid"), entry.get("Address", {})
        return WorkerInfo(place["NodeID"], place["IPAddress"], pid) if pid and place.get("NodeID") else None

    def kill_process(self, info: WorkerInfo) -> None:
        """Kill a process on any node with SIGKILL, even if the process is suspended. Do not wait until it has ended."""
        if info.node_id == self.home:
            _sigkill(info.pid)
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(info.node_id, soft=False)  # a process ID is valid on one node only
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        ray_cluster.untyped_ray().remote(**options)(_sigkill).remote(info.pid)

    @property
    def is_running(self) -> bool:
        """True if this process is connected to Ray."""
        import ray

        return bool(ray.is_initialized())

    def any_ready(self, references: Sequence[Reference], timeout_s: float) -> Collection[Reference]:
        """Wait up to `timeout_s` until at least one remote call has ended. Return the calls that have ended.

        Answers often arrive together, and each query costs time. This method therefore first waits a moment for all
        calls.
        """
        # `ray.get` cannot be used here, because it waits for all calls if an exception is too large to be inlined.
        together_s = max(_TOGETHER_S, _TOGETHER_S_EACH * len(references))
        done = self.ready(references, min(together_s, timeout_s))
        if not done and timeout_s > together_s:
            done = call_lines.wait(references, 1, timeout_s - together_s)
        return list(done)

    def ready(self, references: Collection[Reference], timeout_s: float) -> Collection[Reference]:
        """Wait until all of the given remote calls have ended, but at most `timeout_s`.

        Return the calls that have ended.
        """
        return call_lines.wait(references, len(references), timeout_s)

    def outcome(self, rank: int, reference: Reference) -> Outcome:
        """Return the current outcome of a remote call, without waiting for the call.

        The outcome is the call's value, its failure, or the fact that the call has not ended yet.
        """
        ray = ray_cluster.untyped_ray()
        try:
            if not isinstance(reference, Line):
                value = ray.get(reference, timeout=0)
            else:
                value = reference.answer() if reference.has_answer else ray.get(reference.attending, timeout=0)
            return outcome_of(rank, value)
        except ray.exceptions.GetTimeoutError:
            return Unanswered(rank)
        except ray.exceptions.RayTaskError as error:  # an error that the worker did not wrap, or that Ray raised
            return Failed(rank, Failure("user", _fault(rank, _cause_of(error), str(error))))
        except ray.exceptions.RaySystemError as error:  # this process cannot unpickle the value
            return Failed(rank, Failure("user", _fault(rank, error, "")))
        except ray.exceptions.RayError as error:
            return Failed(rank, Failure("died", _fault(rank, error, "")))


def _cause_of(error: Any) -> BaseException:
    """Return the user's exception that made a remote call fail.

    If the worker could not import a module, return an exception with a clearer message.
    """
    import ray

    cause: BaseException = error.cause or error
    missing = _MISSING_MODULE.search(str(cause)) if isinstance(cause, ray.exceptions.RaySystemError) else None
    return cannot_import(missing[1]) if missing else cause


def _fault(rank: int, error: BaseException, traceback_text: str) -> WorkerFault:
    first_line = str(error).strip().partition("\n")[0]
    return WorkerFault(rank, "unknown", error, type(error).__name__, first_line, "the worker process", traceback_text)


def _sigkill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
