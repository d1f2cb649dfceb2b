"""Options of `TorchTrainer` for steps and for FSDP. They are frozen, and checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.arguments import check_count, check_switch, is_number


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of an optimizer step. `TorchTrainer` has an argument for each.

    Attributes:
        accumulate_grad_batches: Number of batches in an optimizer step. Its gradient is that of one large batch.
        clip_grad_norm: Largest norm of all gradients of an optimizer; None for no limit.
        clip_grad_value: Largest absolute value of each number in the gradients; None for no limit.
        sync_batchnorm: True to compute the statistics of batch norms over the batches of all workers. Needs GPUs.
        compile: True to compile models with `torch.compile`, or a dict of options for it.
        activation_checkpointing: True to compute the elements of `ModuleList` and `Sequential` again in the backward
            pass instead of keeping their activations. Saves memory.

    Raises:
        ValueError: A value cannot work.
    """

    accumulate_grad_batches: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    sync_batchnorm: bool = False
    compile: bool | Mapping[str, Any] = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        window = check_count(
            "accumulate_grad_batches", self.accumulate_grad_batches, hint="1 steps the optimizer on every batch."
        )
        object.__setattr__(self, "accumulate_grad_batches", window)  # may be of numpy
        for name in ("clip_grad_norm", "clip_grad_value"):
            bound = getattr(self, name)
            if bound is not None and not (is_number(bound) and bound > 0):
                raise ValueError(f"`{name}={bound!r}`: need a positive number, or None not to clip.")
        for name in ("sync_batchnorm", "activation_checkpointing"):
            check_switch(name, getattr(self, name))
        if not isinstance(self.compile, bool | Mapping):
            raise ValueError(
                f"`compile={self.compile!r}`: allowed are True, False, and a dict of options for `torch.compile`."
            )
        if isinstance(self.compile, Mapping):
            object.__setattr__(self, "compile", dict(self.compile))  # the caller may change it later

    @property
    def clips(self) -> bool:
        """True if gradients are clipped."""
        return self.clip_grad_norm is not None or self.clip_grad_value is not None


@dataclass(frozen=True)
class FSDPOptions:
    """Options for `TorchTrainer(strategy_options=...)`.

    Attributes:
        min_block_parameters: Smallest number of parameters of a block that is a separate group.
        reshard_after_forward: True to divide blocks again between forward and backward pass. False saves an exchange
            and needs more memory.
        mp_policy: A `MixedPrecisionPolicy` of PyTorch. Only with `precision="fp32"`.
        offload_policy: A `CPUOffloadPolicy` of PyTorch, which keeps a worker's parts in the memory of the host.
    """

    min_block_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    mp_policy: Any = None
    offload_policy: Any = None

    def for_pytorch(self) -> dict[str, Any]:
        """Return the options of `fully_shard` for every group."""
        given = {"mp_policy": self.mp_policy, "offload_policy": self.offload_policy}
        return {name: value for name, value in given.items() if value is not None}
