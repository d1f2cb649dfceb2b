"""`TorchSettings`, the settings of a trainer, and `OperatorContext`, everything a worker's operator is created with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from raysgd.core.arguments import check_kind, check_seed, refuse_text
from raysgd.core.engine.shared.types import World
from raysgd.core.imports import require
from raysgd.torch.constants import VALID_SCHEDULER_STEP
from raysgd.torch.objects.models import fill, is_empty
from raysgd.torch.objects.precision import Precision, choose_precision
from raysgd.torch.parallel.options import FSDPOptions, StepOptions
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.torch.parallel.tensors import trainable
from raysgd.trainer.configuration import STREAMS_NEED, ReplicaSettings


@dataclass(frozen=True, kw_only=True)
class TorchSettings(ReplicaSettings):
    """Settings of a `TorchTrainer` that all its workers use.

    The docstrings of `TorchTrainer` and `ReplicaSettings` explain the fields that are not listed here.

    Attributes:
        use_horovod: True if the trainer's `backend` is "horovod".
        step_options: The trainer's arguments for optimizer steps, such as `clip_grad_norm`.
        fsdp_options: The trainer's `strategy_options`.
        may_grow: True to wrap models even if there is only one worker, because other workers may join later.

    Raises:
        ValueError: A value is invalid.
        ImportError: `use_fp16` or `precision` needs a package that is not installed.
    """

    scheduler_step_freq: str | None = None
    use_fp16: bool | str = False
    precision: str | None = None
    strategy: str = "ddp"
    use_horovod: bool = False
    use_tqdm: bool = False
    add_dist_sampler: bool = True
    step_options: StepOptions = field(default_factory=StepOptions)
    fsdp_options: FSDPOptions = field(default_factory=FSDPOptions)
    seed: int | None = None
    may_grow: bool = False

    def __post_init__(self) -> None:
        if self.scheduler_step_freq and self.scheduler_step_freq not in tuple(VALID_SCHEDULER_STEP):
            allowed = ", ".join(repr(name) for name in sorted(VALID_SCHEDULER_STEP))
            raise ValueError(f"`scheduler_step_freq={self.scheduler_step_freq!r}`: allowed are None, {allowed}.")
        check_kind("step_options", self.step_options, StepOptions)
        if self.seed is not None:
            check_seed(self.seed)
        refuse_text(use_tqdm=self.use_tqdm, add_dist_sampler=self.add_dist_sampler)
        choose_precision(self.use_fp16, self.precision)
        if self.use_tqdm:
            _check_tqdm()

    @property
    def keeps_survivors(self) -> bool:
        """True if the other workers can continue in a new worker group after a worker fails."""
        return self.strategy == "ddp" and not self.use_horovod

    @property
    def obstacle_of_streams(self) -> str | None:
        if self.batch_options.is_auto:
            return "a stream, which is read by parts of a fixed size: pass a number as `micro_batch_size`."
        return super().obstacle_of_streams if self.add_dist_sampler else STREAMS_NEED


def _check_tqdm() -> None:
    try:
        require("tqdm", extra="progress", purpose="`use_tqdm=True`")
    except ImportError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class OperatorContext:
    """The arguments with which one worker creates its operator: settings, rank, device, precision and strategy.

    Attributes:
        settings: The trainer's settings.
        world: Rank of the worker, and the number of workers.
        device: Device of the models.
        precision: Numeric precision of the training.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
    """

    settings: TorchSettings
    world: World
    device: torch.device
    precision: Precision = field(default_factory=Precision)
    parallel: Strategy = field(default_factory=Strategy)

    @property
    def use_gpu(self) -> bool:
        """True if this worker trains on a GPU."""
        return self.device.type == "cuda"

    @property
    def is_one_of_several(self) -> bool:
        """True if there are other workers, or if other workers may join later."""
        return self.world.is_distributed or self.settings.may_grow

    @property
    def wrap_ddp(self) -> bool:
        """True if models are wrapped in `DistributedDataParallel`."""
        return isinstance(self.parallel, DDP)

    @property
    def device_ids(self) -> list[int] | None:
        """Argument `device_ids` for `DistributedDataParallel`; None on a CPU."""
        return [self.device.index or 0] if self.device.type == "cuda" else None

    def to_device(self, part: Any) -> Any:
        """Move a model or criterion to the device, and return it.

        A module on PyTorch's meta device has no memory. It is allocated and initialized on the device, unless the
        strategy shards it later.
        """
        if isinstance(part, torch.nn.Module) and is_empty(part):
            if not (self.parallel.is_sharded and trainable(part)):
                fill(part, self.device)
            return part
        return part.to(self.device) if self.use_gpu and hasattr(part, "to") else part
