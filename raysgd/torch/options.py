"""What a trainer is told about models, steps and sharding; frozen, plain, checked in the driver by `arguments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelOptions:
    """What is done to registered models beside placing and wrapping them.

    Attributes:
        sync_batchnorm: Whether batch norms look at the batches of all workers.
        activation_checkpointing: Whether blocks are computed a second time in the backward pass, to save memory.
        compile: Whether models are compiled, or the options to do that with.
    """

    sync_batchnorm: bool = False
    activation_checkpointing: bool = False
    compile: bool | Mapping[str, Any] = False


@dataclass(frozen=True)
class StepOptions:
    """How gradients become an optimizer step.

    Attributes:
        accumulate_grad_batches: How many batches make a step.
        clip_grad_norm: Bound for the norm of all gradients of an optimizer.
        clip_grad_value: Bound for each single number.
    """

    accumulate_grad_batches: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None

    @property
    def clips(self) -> bool:
        """Whether there is a bound."""
        return self.clip_grad_norm is not None or self.clip_grad_value is not None


@dataclass(frozen=True)
class FSDPOptions:
    """What `TorchTrainer(fsdp_args=...)` may hold.

    Attributes:
        min_block_parameters: A block of the model with fewer parameters is no group of its own.
        reshard_after_forward: Whether blocks are taken apart between forward and backward pass; False keeps them,
            which saves an exchange and needs memory.
        mp_policy: PyTorch's `MixedPrecisionPolicy`, with `precision="fp32"` only.
        offload_policy: PyTorch's `CPUOffloadPolicy`: keeps what a worker holds in the memory of the host.
    """

    min_block_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    mp_policy: Any = None
    offload_policy: Any = None

    def for_pytorch(self) -> dict[str, Any]:
        """The options that `fully_shard` takes for every group."""
        given = {"mp_policy": self.mp_policy, "offload_policy": self.offload_policy}
        return {name: value for name, value in given.items() if value is not None}
