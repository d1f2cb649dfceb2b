"""The system that the workers run on, as the driver needs it, in one place: Ray. Tests bring a simulation of it.

Why the engine reaches Ray through one class: ADR 96.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from raysgd.engine.processes import resources, transfers
from raysgd.engine.processes.gathering import RayPoller
from raysgd.engine.processes.local_worker import LocalWorker
from raysgd.engine.processes.resources import Reservation
from raysgd.engine.processes.slots import Slot
from raysgd.engine.processes.snapshots import Transfer
from raysgd.engine.processes.transfers import SharedValue
from raysgd.engine.processes.worker import RemoteWorker, node_here
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.types import WorkerInfo


class Platform(RayPoller):
    """Starts processes and ends them, holds room for them, and carries what they say."""

    make_reservation: Callable[..., Reservation] = Reservation
    """Asks for resources; takes what `Reservation` takes."""

    @property
    def home(self) -> str:
        """The node of the driver."""
        return node_here()[0]

    def ensure_running(self) -> None:
        """Connects to the cluster, or starts one."""
        resources.ensure_ray()

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        """Begins to start a worker process. Does not wait."""
        return RemoteWorker(slot, connection, num_threads)

    def new_local_worker(self, connection: Connection) -> LocalWorker:
        """A worker in this process."""
        return LocalWorker(copy.deepcopy(connection))  # this one is sent to others

    def begin_thread(self, body: Callable[[], None]) -> Callable[[], None]:
        """Runs `body` in another thread of the driver; returns what waits for its end."""
        thread = threading.Thread(target=body, name="raysgd-listener", daemon=True)
        thread.start()
        return thread.join

    def make_event(self) -> threading.Event:
        """Something that has not happened yet."""
        return threading.Event()

    def find_process(self, worker: RemoteWorker) -> WorkerInfo | None:
        """The process of a worker that has not answered yet; None while there is none."""
        return resources.find_process(worker.actor)

    def watch_process(self, info: WorkerInfo) -> Any:
        """Asks whether a process works that does not answer; a call."""
        return resources.watch_process(info)

    def kill_process(self, info: WorkerInfo) -> None:
        """Ends a process, also one that is stopped and cannot answer. Does not wait."""
        resources.kill_process(info)

    def transfer(self, call: Any) -> Transfer:
        """Return what a call will return, on its way."""
        return transfers.transfer(call)

    def store(self, value: Any) -> SharedValue:
        """Puts a value where all workers can take it from, once."""
        return transfers.store(value)
