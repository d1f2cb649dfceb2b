"""Options of `TorchTrainer` for optimizer steps and for FSDP, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.arguments import check_count, check_switch, is_number


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options for optimizer steps. `TorchTrainer` has an argument for each of them.

    Attributes:
        accumulate_grad_batches: Number of batches per optimizer step. The step's gradient equals the gradient of one
            large batch with the samples of all these batches.
        clip_grad_norm: Maximum total norm of an optimizer's gradients; None for no limit.
        clip_grad_value: Largest absolute value of each element of the gradients; None for no limit.
        sync_batchnorm: True to compute the statistics of batch norms over the batches of all workers. Needs GPUs.
        compile: True to compile models with `torch.compile`, or a dict of options for `torch.compile`.
        activation_checkpointing: True to recompute the activations in elements of `ModuleList` and `Sequential` in the
            backward pass instead of storing them. Saves memory.

    Raises:
        ValueError: A value is invalid.
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
        object.__setattr__(self, "accumulate_grad_batches", window)  # a Python integer, even if a NumPy one was passed
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
            object.__setattr__(self, "compile", dict(self.compile))  # a copy, because the caller may change the dict

    @property
    def clips(self) -> bool:
        """True if the trainer's options require that gradients are clipped."""
        return self.clip_grad_norm is not None or self.clip_grad_value is not None


@dataclass(frozen=True)
class FSDPOptions:
    """Options for `strategy="fsdp"`, which users pass as `TorchTrainer(strategy_options=...)`.

    Attributes:
        min_block_parameters: A block (an element of a `ModuleList` or `Sequential`) with at least this number of
            parameters is gathered separately.
        reshard_after_forward: True to reshard each block after its forward pass and gather it again for the backward
            pass. False saves communication and needs more memory.
        mp_policy: PyTorch's `MixedPrecisionPolicy`, or None. Allowed only with `precision="fp32"`.
        offload_policy: PyTorch's `CPUOffloadPolicy`, which stores a worker's shards in host memory, or None.
    """

    min_block_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    mp_policy: Any = None
    offload_policy: Any = None

    def for_pytorch(self) -> dict[str, Any]:
        """Return the keyword arguments to pass to each call to `fully_shard`."""
        given = {"mp_policy": self.mp_policy, "offload_policy": self.offload_policy}
        return {name: value for name, value in given.items() if value is not None}
