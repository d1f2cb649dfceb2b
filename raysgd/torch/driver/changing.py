"""What the changes of live workers need with PyTorch: which are possible, and how a state gets into the workers."""

from __future__ import annotations

from typing import Any

from raysgd.engine.processes.snapshots import Snapshot
from raysgd.torch.driver import arguments
from raysgd.torch.driver.saving import SavingTrainer
from raysgd.torch.driver.state_loader import StateLoader
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.torch_runner import TorchRunner


class ChangingTorchTrainer(SavingTrainer):
    """A trainer whose workers can go on with another class, or with the state of others."""

    _settings: TorchSettings
    _runner_cls = TorchRunner

    def _check_reload(self, training_operator_cls: Any) -> None:
        arguments.check_operator_class(training_operator_cls)
        if self._facts.is_sharded or self.backend == "horovod":
            what = '`backend="horovod"`' if self.backend == "horovod" else '`parallel="fsdp"`'
            raise ValueError(f"`reload` cannot work with {what}: save, and load into a new trainer with the new class.")

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        StateLoader(self._controller).load_snapshot(snapshot)
