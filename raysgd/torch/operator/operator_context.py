"""The context of one operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from raysgd.engine.shared.types import World
from raysgd.torch.objects.filling import fill, is_empty
from raysgd.torch.objects.precision import Precision
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.ddp import DDP
from raysgd.torch.parallel.strategy import NoParallel, trainable


@dataclass(frozen=True)
class OperatorContext:
    """The place of one operator among its replicas, and the objects that it works with."""

    settings: TorchSettings
    world: World
    device: torch.device
    precision: Precision = field(default_factory=Precision)
    parallel: NoParallel = field(default_factory=NoParallel)

    @property
    def use_gpu(self) -> bool:
        """True if the trainer requested a GPU and there is one."""
        return self.device.type == "cuda"

    @property
    def wrap_ddp(self) -> bool:
        """True if models are wrapped in `DistributedDataParallel`."""
        return isinstance(self.parallel, DDP)

    @property
    def device_ids(self) -> list[int] | None:
        """The `device_ids` for `DistributedDataParallel`: None on a CPU."""
        return [self.device.index or 0] if self.device.type == "cuda" else None

    def place(self, part: Any) -> Any:
        """Brings a model or a criterion to the device. One without numbers gets them, unless it is divided later."""
        if isinstance(part, torch.nn.Module) and is_empty(part):
            if not (self.parallel.is_sharded and trainable(part)):
                fill(part, self.device)
            return part
        return part.to(self.device) if self.use_gpu and hasattr(part, "to") else part
