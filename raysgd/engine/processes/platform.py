"""What the driver needs of the system that its workers run on, in one place: Ray. Tests bring a simulation of it.

Why the engine reaches Ray through a protocol: ADR 96.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, Protocol

from raysgd.engine.processes import resources, transfers
from raysgd.engine.processes.gathering import CallListener, RayPoller
from raysgd.engine.processes.local_worker import LocalWorker
from raysgd.engine.processes.resources import Reservation
from raysgd.engine.processes.slots import Slot
from raysgd.engine.processes.snapshots import Transfer
from raysgd.engine.processes.transfers import SharedValue
from raysgd.engine.processes.worker import RemoteWorker, node_here
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.types import WorkerInfo


class ThreadEvent(Protocol):
    """What threads of the driver tell each other by."""

    def set(self) -> None:
        """Says that it has happened."""

    def wait(self, timeout: float) -> bool:
        """Waits until it has; False if that took too long."""


class Platform(CallListener, Protocol):
    """Starts processes and ends them, holds room for them, and carries what they say."""

    make_reservation: Callable[..., Reservation]
    """Asks for resources; takes what `Reservation` takes."""

    @property
    def home(self) -> str:
        """The node of the driver."""

    def ensure_running(self) -> None:
        """Connects to the cluster, or starts one."""

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        """Begins to start a worker process. Does not wait."""

    def new_local_worker(self, connection: Connection) -> LocalWorker:
        """A worker in this process."""

    def begin_thread(self, body: Callable[[], None]) -> Callable[[], None]:
        """Runs `body` in another thread of the driver; returns what waits for its end."""

    def make_event(self) -> ThreadEvent:
        """Something that has not happened yet."""

    def find_process(self, worker: RemoteWorker) -> WorkerInfo | None:
        """The process of a worker that has not answered yet; None while there is none."""

    def watch_process(self, info: WorkerInfo) -> Any:
        """Asks whether a process works that does not answer; a call."""

    def kill_process(self, info: WorkerInfo) -> None:
        """Ends a process, also one that is stopped and cannot answer. Does not wait."""

    def transfer(self, call: Any) -> Transfer:
        """What a call will return, on its way."""

    def store(self, value: Any) -> SharedValue:
        """Puts a value where all workers can take it from, once."""


class RayPlatform(RayPoller):
    """Ray."""

    make_reservation: Callable[..., Reservation] = Reservation

    @property
    def home(self) -> str:
        return node_here()[0]

    def ensure_running(self) -> None:
        resources.ensure_ray()

    def new_worker(self, slot: Slot, connection: Connection, num_threads: int) -> RemoteWorker:
        return RemoteWorker(slot, connection, num_threads)

    def new_local_worker(self, connection: Connection) -> LocalWorker:
        return LocalWorker(copy.deepcopy(connection))  # this one is sent to others

    def begin_thread(self, body: Callable[[], None]) -> Callable[[], None]:
        thread = threading.Thread(target=body, name="raysgd-listener", daemon=True)
        thread.start()
        return thread.join

    def make_event(self) -> ThreadEvent:
        return threading.Event()

    def find_process(self, worker: RemoteWorker) -> WorkerInfo | None:
        return resources.find_process(worker.actor)

    def watch_process(self, info: WorkerInfo) -> Any:
        return resources.watch_process(info)

    def kill_process(self, info: WorkerInfo) -> None:
        resources.kill_process(info)

    def transfer(self, call: Any) -> Transfer:
        return transfers.transfer(call)

    def store(self, value: Any) -> SharedValue:
        return transfers.store(value)
