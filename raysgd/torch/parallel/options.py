"""Options of `TorchTrainer` for steps and for sharding: frozen, plain, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._arguments import check_count, check_switch, is_number


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step beyond forward and backward pass, which `TorchTrainer` takes one by one.

    Attributes:
        accumulate_grad_batches: How many batches make an optimizer step; its gradient is that of one large batch.
        clip_grad_norm: Bound for the norm of the gradients of an optimizer, all together.
        clip_grad_value: Bound for each single number of the gradients.
        sync_batchnorm: Whether batch norms look at the batches of all workers. On GPUs.
        compile: Whether models are compiled by `torch.compile`; a dict holds options for it.
        activation_checkpointing: Whether the elements of `ModuleList` and `Sequential` are computed a second time in
            the backward pass instead of being kept, which saves memory.

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
        object.__setattr__(self, "accumulate_grad_batches", window)  # Python's, if it was numpy's
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
        """True if there is a bound."""
        return self.clip_grad_norm is not None or self.clip_grad_value is not None


@dataclass(frozen=True)
class FSDPOptions:
    """The options that `TorchTrainer(strategy_options=...)` may hold.

    Attributes:
        min_block_parameters: A block of the model with fewer parameters is not a separate group.
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
