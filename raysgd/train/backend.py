"""The plug-in interface for connections between the workers of a function-based trainer.

A plug-in consists of a `BackendConfig`, which users create, and a `Backend`, whose `on_*` methods run in the driver and
access the workers through a `WorkerGroup`. If all ranks must join a process group together before `on_start` is called,
the config's `connection` method returns that group's `Connection`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.air.session import current_session
from raysgd.compat.names import MOVED, former_names
from raysgd.core.cluster.resources import DriverView
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.engine.shared.interface import Connection, NoConnection
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.exceptions import InactiveWorkerGroupError, TrainBackendError, TrainingWorkerError

if TYPE_CHECKING:
    from raysgd.train.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "BackendConfig",
    "Connection",
    "EncodedData",
    "InactiveWorkerGroupError",
    "TrainBackendError",
    "TrainingWorkerError",
    "resolve",
    *MOVED[__name__],
]

EncodedData = Any
_NAMED = {
    "torch": ("raysgd.train.torch", "TorchConfig"),
    "tensorflow": ("raysgd.train.tensorflow", "TensorflowConfig"),
    "horovod": ("raysgd.train.horovod", "HorovodConfig"),
}


class Backend:
    """The part of a plug-in that connects a trainer's workers and converts their data.

    Each trainer creates a `Backend` in the driver.

    Attributes:
        share_cuda_visible_devices: True if each worker sees the GPUs of all workers on its node.
    """

    share_cuda_visible_devices: bool = False

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Called in the driver when all workers have started, and again whenever the workers are restarted.

        Not called when workers join or leave the group while a function runs (`elastic=True`). Override this to connect
        the workers.
        """

    def on_training_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Called in the driver before a training function starts on the workers."""

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Called in the driver before workers are shut down cleanly. Exceptions raised here are only logged."""

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> EncodedData:
        """Convert a report or checkpoint to the form in which it is sent to the driver. Called in the worker."""
        return data_dict

    @staticmethod
    def decode_data(encoded_data: EncodedData) -> dict[str, Any]:
        """Convert a report or checkpoint back from the form that `encode_data` returned. Called in the driver."""
        return encoded_data

    @staticmethod
    def explain(error: Exception) -> Exception:
        """Return the exception to raise in place of an exception that the function has raised. Called in the worker.

        Return the same exception, or one with a clearer message.
        """
        return error


class BackendConfig:
    """Config with which users select a plug-in. With this base class, the workers run without a connection."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of the plug-in that this config selects."""
        return Backend

    def connection(self, num_gpus_per_worker: float) -> Connection:
        """Return the connection between the workers, which each worker joins when it starts."""
        return NoConnection()

    def view_of_driver(self) -> DriverView:
        """Return what the framework sees of GPUs in this process, to choose GPUs with `use_gpu="auto"`."""
        return DriverView()

    def can_regroup(self, num_gpus_per_worker: float) -> bool:
        """Return True if the remaining workers can form another group after a failure while a function runs."""
        return False


@dataclass
class PlacedConnection(Connection):
    """Wraps a connection so that each worker gets environment variables, such as `RANK`, before it joins the group.

    The wrapped connection is joined even if there is only one worker.

    Attributes:
        inner: The wrapped connection.
        shares_gpus: True if each worker sees the GPUs of all workers on its node.
        names_address: True to set `MASTER_ADDR` and `MASTER_PORT`.
        names_place: True to set `RANK`, `WORLD_SIZE` and related variables.
    """

    inner: Connection
    shares_gpus: bool = False
    names_address: bool = False
    names_place: bool = False
    _before: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        self.inner.limit_threads(num_threads)

    def load(self) -> None:
        self.inner.load()

    def open_endpoint(self, host: str) -> int:
        return self.inner.open_endpoint(host)

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        for name, value in self.variables(rendezvous, world).items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        self.inner.join(rendezvous, world, even_alone=True)

    def variables(self, rendezvous: Rendezvous, world: World) -> dict[str, str]:
        """Return the environment variables, such as `RANK`, to set in a worker before it joins the group."""
        variables = {}
        if self.shares_gpus and world.node_gpu_ids:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(world.node_gpu_ids)
        if self.names_address:
            variables |= {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}
        if self.names_place:
            variables |= {
                "RANK": str(world.rank),
                "WORLD_SIZE": str(world.size),
                "LOCAL_RANK": str(world.local_rank),
                "LOCAL_WORLD_SIZE": str(world.local_size),
                "NODE_RANK": str(world.node_rank),
            }
        return variables

    def interrupt(self) -> None:
        self.inner.interrupt()
        membership = _membership()
        if membership is not None:
            membership.note_broken(MeshBroken("the group is formed again, because workers were lost"))

    def leave_for_another(self) -> None:
        """Leave the group so that this worker can join another group while the function runs.

        First interrupt the connection, and wait until the function's collectives in the group have failed.
        """
        membership = _membership()
        if membership is not None:
            self.inner.interrupt()
            membership.leave()
        self.leave()

    def leave(self) -> None:
        self.inner.leave()
        while self._before:
            name, value = self._before.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def is_connection_error(self, error: BaseException) -> bool:
        return self.inner.is_connection_error(error)


def _membership() -> Any:
    """Return the `Membership` of the training function that runs in this process.

    Return None if no function runs, or if its group cannot change while it runs.
    """
    return getattr(current_session(), "membership", None)


def resolve(backend: str | BackendConfig) -> BackendConfig:
    """Return a new config of the plug-in with this name, or `backend` itself if it is a config.

    Raises:
        ValueError: The name is unknown.
        TypeError: `backend` is neither a name nor a config.
        ModuleNotFoundError: The framework is not installed.
    """
    if isinstance(backend, BackendConfig):
        return backend
    if not isinstance(backend, str):
        hint = f": pass an instance, `{backend.__name__}()`" if inspect.isclass(backend) else ""
        raise TypeError(f"`backend={backend!r}`: need a name or a `BackendConfig`{hint}.")
    if backend not in _NAMED:
        raise ValueError(f"`backend={backend!r}`: allowed are {', '.join(map(repr, _NAMED))}.")
    module, name = _NAMED[backend]
    return getattr(importlib.import_module(module), name)()


def backend_of(config: BackendConfig) -> Backend:
    """Create the plug-in that a config selects. `backend_cls` should be a property, but may also be a method.

    Raises:
        TypeError: `backend_cls` does not provide a backend.
    """
    backend_cls: Any = config.backend_cls
    if not inspect.isclass(backend_cls) and callable(backend_cls):
        backend_cls = backend_cls()
    made: Any = backend_cls() if inspect.isclass(backend_cls) else backend_cls
    missing = [name for name in ("on_start", "on_shutdown", "encode_data", "decode_data") if not hasattr(made, name)]
    if missing:
        raise TypeError(
            f"`{type(config).__name__}.backend_cls` gives {backend_cls!r}, which has no {', '.join(missing)}: need a "
            "subclass of `raysgd.train.backend.Backend`."
        )
    return made


former_names(__name__)
