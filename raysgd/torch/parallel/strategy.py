"""`Strategy`: base class of the strategies, such as DDP, that keep the workers' models in sync.

A strategy prepares models and optimizers for several ranks, and knows how to save, load and evaluate them. Its `sync`
averages the gradients of each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from raysgd.core.connections.torch import summation_beside
from raysgd.torch.objects.blocks import without_checkpointing
from raysgd.torch.objects.loading import load_model, load_optimizer
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.parallel.tensors import all_sum, repeat_first, take_from_first, trainable, unwrap

# A function that starts to sum a tensor of integers over the ranks, in place. It returns a function that waits for the
# sum.
Summation = Callable[[torch.Tensor], Callable[[], Any]]


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a model.

    Modules may have attributes that are tensors in an autograd graph. `copy.deepcopy` alone would reject these.
    """
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


class Strategy:
    """Base class of all strategies.

    It is also the strategy for `strategy="none"`, and for a single worker that no other workers can join.

    Args:
        sync: See the attribute.

    Attributes:
        sync: Averages the gradients of each step over the ranks. Default: gradients are not averaged.
        is_sharded: True if each rank holds only a shard of each model, so that all ranks must take part to assemble a
            full state.
        forward_context: Function that returns the context manager, such as autocast, for forward passes.
        shares_frozen: True if the other ranks copy rank 0's frozen parameters. False if each rank creates the same
            frozen parameters itself.
    """

    is_sharded = False

    def __init__(self, sync: GradientSync | None = None) -> None:
        self.sync = sync or GradientSync()
        self.forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.shares_frozen = True

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """Wrap a model if this strategy requires it. Return the model to call in training.

        Args:
            model: Model on this rank's device.
            device_ids: Argument of `DistributedDataParallel`.
            options: Further arguments of `DistributedDataParallel`.
        """
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Wrap an optimizer if this strategy requires it. Return the optimizer to use in training."""
        return optimizer

    def _leave_out(self, model: torch.nn.Module) -> torch.nn.Module:
        """Copy rank 0's values into a model without trainable parameters, and return the model without a wrapper."""
        take_from_first((*(model.parameters() if self.shares_frozen else ()), *model.buffers()))
        self.sync.left_out.append(model)
        return model

    def _repeat_buffers(self, wrapped: Sequence[torch.nn.Module]) -> None:
        """Copy rank 0's buffers of models to all ranks: those of wrapped models and of models without a wrapper."""
        for model in (*wrapped, *self.sync.left_out):
            repeat_first(model.buffers())

    def rebind_optimizers(self, optimizers: Sequence[Any]) -> None:
        """If wrapping has replaced the models' parameters, replace them in the optimizers, too."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Install what averages gradients, on models that are wrapped by this strategy or by user code.

        Called after `setup`.
        """

    def rewrap(self, models: Sequence[torch.nn.Module], is_agreed: bool = False) -> None:
        """Start averaging the gradients of all parameters that are trainable now.

        All ranks must call this method together.

        Args:
            models: Wrapped models.
            is_agreed: True if all ranks are known to have the same weights and trainable parameters, so that nothing
                needs to be copied from rank 0.

        Raises:
            ValueError: A model now has trainable parameters but had none when it was registered, so it has no wrapper
                that could average its gradients.
        """
        for model in self.sync.left_out:
            if trainable(model) and any(model is each for each in models):
                raise ValueError(
                    f"A model without trainable parameters when it was registered (`{type(model).__name__}`) now has "
                    "parameters with `requires_grad=True`, but their gradients are not averaged over the workers. "
                    "Freeze the model after `register` instead of before. A model that is registered with trainable "
                    "parameters may be frozen and unfrozen later."
                )

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        """Return the names of those parameters of a model that may differ between ranks; None if all may differ.

        Args:
            model: Model without its wrapper.
        """
        return None

    @property
    def obstacle(self) -> str | None:
        """Reason why training cannot continue in a new worker group after a failure, so that it must restart.

        None if training can continue.
        """
        return "the replicas are not kept in sync by `DistributedDataParallel`"

    def reform(self) -> None:
        """Adapt the models to the worker group that this process has joined. The model objects stay the same."""
        self.sync.join_group()

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Prepare the models for evaluation in the `with` block. Ranks may have different numbers of batches."""
        yield

    def state_of(self, part: Any) -> dict[str, Any]:
        """Return the full state dict of a model or optimizer.

        If models are sharded, all ranks must call this method together, and only rank 0 gets the full state.
        """
        state: dict[str, Any] = part.state_dict()
        return state

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor that is sharded like `tensor`, with another dtype."""
        return torch.empty_like(tensor, dtype=dtype)

    @property
    def group_beside(self) -> Any:
        """Separate process group for collectives outside of training; None if models are not sharded.

        The first read is a collective operation, in which all ranks must take part.
        """
        return None

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Load a full state dict into a model."""
        load_model(model, state)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Load a full state dict into an optimizer."""
        load_optimizer(optimizer, state)

    def plain_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return a CPU copy of a model without the library's wrappers and hooks; None on ranks that get no copy."""
        return without_checkpointing(_copied(unwrap(model)).cpu())

    def all_sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place. All ranks must call this method together."""
        all_sum(tensor)

    def summation(self) -> Summation:
        """Return a function that starts to sum a tensor over the ranks, in the background.

        The returned function itself returns a function that waits for the sum. All ranks must call this method
        together.
        """
        # Use a separate process group, because different ranks may start a sum and a gradient all-reduce in different
        # orders. In the default group, the wrong operations would then be matched.
        start_sum = summation_beside()
        return lambda numbers: start_sum(numbers).wait
