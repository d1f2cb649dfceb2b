"""Runs Horovod in training functions, on the trainer's own workers, without `mpirun` or ssh.

Horovod is initialized before the function starts, so calling `hvd.init()` in the function is harmless. After a failure,
all workers are new processes that initialize Horovod again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.core.connections.horovod import HorovodConnection, import_horovod
from raysgd.core.engine.shared.interface import Connection
from raysgd.core.imports import lazy_names
from raysgd.train.backend import Backend, BackendConfig, PlacedConnection

import_horovod()

from raysgd.train._torch.process_group import TorchBackend  # noqa: E402

if TYPE_CHECKING:
    from raysgd.train.data_parallel_trainer import HorovodTrainer as HorovodTrainer

lazy_names(__name__, {"HorovodTrainer": "raysgd.train.data_parallel_trainer"})


@dataclass
class HorovodConfig(BackendConfig):
    """Connects the workers with Horovod and Gloo. With a single worker, Horovod is initialized too.

    Options for ssh and Horovod's own launcher exist only for programs that set or read them. raysgd does not use ssh,
    because Ray starts the workers.

    Attributes:
        nics: The network interfaces to use. If you pass several, each node uses the alphabetically first interface
            that it has. Default: the interface through which rank 0's worker is reached.
        verbose: Not used.
        key: Not used; generated if it is None.
        ssh_port: Not used.
        ssh_identity_file: New file to which `ssh_str` is written, readable only by its owner. An existing file is not
            changed.
        ssh_str: A private key.
        timeout_s: How long the workers wait for each other at startup.
        placement_group_timeout_s: Not used; see `TRAIN_PLACEMENT_GROUP_TIMEOUT_S`.
    """

    nics: str | Collection[str] | None = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100

    def __post_init__(self) -> None:
        if self.ssh_str and self.ssh_identity_file and not Path(self.ssh_identity_file).exists():
            descriptor = os.open(self.ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(self.ssh_str)
        if self.key is None:
            self.key = secrets.token_hex(32)

    @property
    def start_timeout(self) -> Any:
        """A Horovod `Timeout` object. Its time of `timeout_s` seconds starts when this property is read."""
        from horovod.runner.common.util.timeout import Timeout

        return Timeout(self.timeout_s, message="Horovod waited for {activity} for longer than {timeout} s.")

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchBackend

    def connection(self, num_gpus_per_worker: float) -> Connection:
        names, seconds = [self.nics] if isinstance(self.nics, str) else self.nics or (), float(self.timeout_s)
        usual = HorovodConnection.timeout_s
        return PlacedConnection(
            HorovodConnection(timeout_s=max(usual, seconds), form_timeout_s=seconds, interfaces=tuple(sorted(names)))
        )
