"""Settings of the replicas of a `TorchTrainer`: checked once, in the driver, passed whole to runner and operator."""

from __future__ import annotations

from dataclasses import dataclass, field

from raysgd._arguments import check_kind, check_seed, refuse_text
from raysgd._imports import require
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.messages.settings import STREAMS_NEED, ReplicaSettings
from raysgd.torch.constants import VALID_SCHEDULER_STEP
from raysgd.torch.objects.precision import choose_precision
from raysgd.torch.parallel.options import FSDPOptions, StepOptions


@dataclass(frozen=True, kw_only=True)
class TorchSettings(ReplicaSettings):
    """The settings that every replica is made from. The docstring of `TorchTrainer` explains each field.

    Raises:
        ValueError: A value cannot work.
        ImportError: The precision needs a package that is missing.
    """

    scheduler_step_freq: str | None = None
    use_fp16: bool | str = False
    precision: str | None = None
    parallel: str = "ddp"
    use_horovod: bool = False
    use_tqdm: bool = False
    add_dist_sampler: bool = True
    step_options: StepOptions = field(default_factory=StepOptions)
    fsdp_options: FSDPOptions = field(default_factory=FSDPOptions)
    worker_callbacks: tuple[WorkerCallback, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.scheduler_step_freq and self.scheduler_step_freq not in tuple(VALID_SCHEDULER_STEP):
            allowed = ", ".join(repr(name) for name in sorted(VALID_SCHEDULER_STEP))
            raise ValueError(f"`scheduler_step_freq={self.scheduler_step_freq!r}`: allowed are None, {allowed}.")
        super().__post_init__()
        check_kind("step_options", self.step_options, StepOptions)
        if self.seed is not None:
            check_seed(self.seed)
        refuse_text(use_tqdm=self.use_tqdm, add_dist_sampler=self.add_dist_sampler)
        choose_precision(self.use_fp16, self.precision)
        if self.use_tqdm:
            _check_tqdm()

    @property
    def obstacle_of_streams(self) -> str | None:
        return super().obstacle_of_streams if self.add_dist_sampler else STREAMS_NEED


def _check_tqdm() -> None:
    try:
        require("tqdm", extra="progress", purpose="`use_tqdm=True`")
    except ImportError as error:
        raise ValueError(str(error)) from error
