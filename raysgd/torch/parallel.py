"""How the replicas of a model are kept equal: one object, asked nowhere else.

The loss of a batch is the mean over its samples, and the transport takes the plain mean of the ranks' gradients. Where
the ranks' batches differ in size the two do not fit together, so a rank's gradient is weighted by its share of the
samples first (`Step.weight`, 1.0 nearly always). Where the library itself runs the backward pass it weights the loss,
which is free; where user code may call `backward` by itself, a communication hook weights the gradient on its way out.
"""

# No postponed annotations here: PyTorch looks at those of a communication hook and takes types only, no strings.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Starts to add a tensor of integers up over the ranks, in place, and returns what waits for it.
Summation = Callable[[torch.Tensor], Callable[[], Any]]


@dataclass
class Step:
    """The step that a replica is in; written by the runner right before it hands a batch out.

    Attributes:
        weight: Factor for this rank's gradient.
        num_samples: This rank's samples in the step, 0 when the batch is only there to take part in the collectives.
    """

    weight: float = 1.0
    num_samples: int | None = None

    @property
    def is_padding(self) -> bool:
        return self.num_samples == 0


class NoParallel:
    """A single replica, or replicas that the user keeps equal.

    Attributes:
        synchronizes: Whether every step involves all ranks.
        step: The step that the replica is in.
    """

    synchronizes = False

    def __init__(self) -> None:
        self.step = Step()

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """The model to call in training."""
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """The optimizer to use in training."""
        return optimizer

    def arm(self, models: Sequence[torch.nn.Module], weight_in_hook: bool) -> None:
        """Gets ready to weight gradients."""

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run the backward pass on."""
        return loss

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """The context for evaluation, where ranks may have different numbers of batches."""
        yield

    def all_sum(self, tensor: torch.Tensor) -> None:
        """Adds a tensor up over all ranks, in place; every one of several ranks has to ask."""
        dist.all_reduce(tensor)

    def summation(self) -> Summation:
        """A way to add numbers up over the ranks beside the training; all ranks must ask for it at the same time."""
        raise NotImplementedError("replicas that do not step together have nothing to agree on")


class DDP(NoParallel):
    """`DistributedDataParallel` around every model that has something to train."""

    synchronizes = True

    def __init__(self) -> None:
        super().__init__()
        self._weights_in_hook = False

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # DDP refuses a frozen model, and there is no gradient to average
        return DistributedDataParallel(model, device_ids=device_ids, **options)

    def arm(self, models: Sequence[torch.nn.Module], weight_in_hook: bool) -> None:
        """Installs the hook that weights gradients, once and only if it is needed.

        A model for which the user registered a hook of his own keeps that one; PyTorch allows one each.
        """
        if self._weights_in_hook or not weight_in_hook:
            return
        self._weights_in_hook = True
        for model in models:
            if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
                model.register_comm_hook(self.step, _weight_and_average)

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        if self._weights_in_hook or self.step.weight == 1.0:
            return loss
        return loss * self.step.weight

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Gives every rank rank 0's buffers once, then keeps forward passes free of collectives."""
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        for model in wrapped:
            for buffer in model.module.buffers():
                dist.broadcast(buffer, 0)
        before = [model.require_forward_param_sync for model in wrapped]
        try:
            for model in wrapped:
                model.require_forward_param_sync = False
            yield
        finally:
            for model, flag in zip(wrapped, before, strict=True):
                model.require_forward_param_sync = flag

    def summation(self) -> Summation:
        # A group of its own: on the default one these calls could overtake those of the backward pass.
        group = dist.new_group(backend="gloo")

        def start(numbers: torch.Tensor) -> Callable[[], Any]:
            return dist.all_reduce(numbers, group=group, async_op=True).wait

        return start


def _weight_and_average(step: Step, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if step.weight != 1.0:
        bucket.buffer().mul_(step.weight)
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model without our wrapper, and without one that the user put around it under the usual name `module`."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, torch.nn.Module) else model
