"""The `torch.distributed` process group that the workers join before a function runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from raysgd.air.session import current_session
from raysgd.core.arguments import check_seconds
from raysgd.core.cluster.resources import DriverView, choose_gpus
from raysgd.core.connections.torch import TorchConnection, end_process_group, variables_of_nccl, view_of_driver
from raysgd.core.engine.shared.interface import FORM_TIMEOUT_S, Connection
from raysgd.train.backend import Backend, BackendConfig, EncodedData, PlacedConnection

if TYPE_CHECKING:
    from raysgd.train.worker_group import WorkerGroup

_GOODBYE_S = 2.0


@dataclass
class TorchConfig(BackendConfig):
    """Connects the workers in a `torch.distributed` process group. A single worker also gets a process group.

    Attributes:
        backend: Backend of PyTorch, such as "nccl" or "gloo"; None for NCCL if each worker has a GPU, or if NCCL lets
            workers share a GPU, else gloo.
        init_method: "env" to set `MASTER_ADDR` and `MASTER_PORT` in the workers; "tcp" to leave them unset.
        timeout_s: Maximum number of seconds that a collective waits for the other ranks.
        form_timeout_s: Maximum number of seconds that the workers take to form the group. Capped at `timeout_s`.

    Raises:
        ValueError: `init_method` is neither "env" nor "tcp", or a timeout is invalid. Raised when the workers start.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800
    form_timeout_s: float = FORM_TIMEOUT_S

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchBackend

    def connection(self, num_gpus_per_worker: float) -> Connection:
        check_seconds("timeout_s", self.timeout_s, may_be_least=False)
        check_seconds("form_timeout_s", self.form_timeout_s, may_be_least=False)
        if self.init_method not in ("env", "tcp"):
            raise ValueError(f'`init_method={self.init_method!r}`: allowed are "env" and "tcp".')
        transport, variables = self._transport(num_gpus_per_worker), variables_of_nccl()
        group = TorchConnection(
            transport, timeout_s=float(self.timeout_s), form_timeout_s=float(self.form_timeout_s), variables=variables
        )
        return PlacedConnection(group, names_address=self.init_method == "env", names_place=True)

    def can_regroup(self, num_gpus_per_worker: float) -> bool:
        return self._transport(num_gpus_per_worker) == "gloo"

    def _transport(self, num_gpus_per_worker: float) -> str:
        backend, has_gpus = self.backend or "auto", num_gpus_per_worker > 0
        options: dict[str, Any] = {"num_gpus_per_worker": num_gpus_per_worker, "backend": backend}
        return choose_gpus(has_gpus, 1, self.view_of_driver(), None, **options).backend

    def view_of_driver(self) -> DriverView:
        return view_of_driver()


class TorchBackend(Backend):
    """The plug-in that `TorchConfig` selects.

    `encode_data` removes `DistributedDataParallel` wrappers from models in reports and checkpoints. The encoder then
    copies tensors to host memory, and also unwraps models that are nested inside a checkpoint.
    """

    share_cuda_visible_devices = True

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Let the workers leave their process group. Wait at most 2 s, because workers may be busy."""
        import ray

        references = worker_group.execute_async(_destroy)
        ray.wait(references, num_returns=len(references), timeout=_GOODBYE_S)

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> EncodedData:
        return {key: unwrapped(value) for key, value in data_dict.items()}


def unwrapped(value: Any) -> Any:
    """Return a model without its `DistributedDataParallel` wrapper. Return any other value unchanged."""
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value


def _destroy() -> None:
    """Leave the process group, unless a function is still running and may be in a collective operation."""
    if current_session() is None:
        end_process_group()
