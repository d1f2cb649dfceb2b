"""The class `Platform`, through which the driver's part of the engine uses Ray. Tests replace it with a simulation.

ADR 131 explains why all uses of Ray go through one class.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from raysgd.core.cluster import call_lines, ray_cluster
from raysgd.core.cluster.call_lines import Line, Reference
from raysgd.core.cluster.ray_cluster import RayThread
from raysgd.core.engine import transfers
from raysgd.core.engine.handles import LocalWorker, RemoteWorker, outcome_of
from raysgd.core.engine.placement import Reservation, Slot
from raysgd.core.engine.shared.interface import Connection
from raysgd.core.engine.shared.types import Failed, Failure, Outcome, Unanswered, WorkerInfo
from raysgd.core.engine.worker import node_here
from raysgd.core.private_names import find_name
from raysgd.core.sending import cannot_import
from raysgd.exceptions import WorkerFault

_TOGETHER_S = 0.01  # how long to wait for all calls before waiting for any call: one query for many answers is faster
# With more than 200 calls, the wait is longer: this many seconds per call. With one query for each answer, the total
# time of the queries would be quadratic in the number of calls.
_TOGETHER_S_EACH = 0.00005
_MISSING_MODULE = re.compile(r"No module named '([^']+)'")


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

    def any_ready(self, references: Sequence[Reference], timeout_s: float | None) -> Collection[Reference]:
        """Wait up to `timeout_s` until at least one remote call has ended. Return the calls that have ended.

        If `timeout_s` is None, wait without limit.

        Answers often arrive together, and each query costs time. This method therefore first waits a moment for all
        calls.
        """
        # `ray.get` cannot be used here, because it waits for all calls if an exception is too large to be inlined.
        together_s = max(_TOGETHER_S, _TOGETHER_S_EACH * len(references))
        done = self.ready(references, together_s if timeout_s is None else min(together_s, timeout_s))
        if not done and (timeout_s is None or timeout_s > together_s):
            left_s = None if timeout_s is None else timeout_s - together_s
            done = call_lines.wait(references, 1, left_s)
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
