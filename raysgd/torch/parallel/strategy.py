"""`Strategy` keeps the workers' models in sync, such as `DDP`, even if the worker group changes.

A strategy prepares models and optimizers for several ranks, and knows how to save, load and evaluate them. Its `sync`
averages the gradients of each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.connections.torch import summation_beside
from raysgd.core.private_names import require_names
from raysgd.torch.objects.loading import load_model, load_optimizer
from raysgd.torch.objects.models import without_checkpointing
from raysgd.torch.parallel.sync import COMM_HOOK, DDPSync, GradientSync, check_group, has_state, wrappers
from raysgd.torch.parallel.tensors import all_sum, repeat_first, take_from_first, trainable, unwrap

_HOOK_WITH_STATE = "a communication hook in `ddp_args` has a state that differs between workers"

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


@dataclass(eq=False)
class _WrappedModel:
    """A model in a `DistributedDataParallel` wrapper.

    Attributes:
        model: The wrapper, which contains the model.
        options: Arguments that the wrapper was created with.
        hook: The user's communication hook, or None.
        covered: Parameters whose gradients the wrapper averages. They were trainable when the wrapper was created, or
            at the last `rewrap`. If no parameter was trainable at the last `rewrap`, see `_with_gradients`.
    """

    model: DistributedDataParallel
    options: dict[str, Any]
    hook: Any
    covered: tuple[torch.nn.Parameter, ...]


class DDP(Strategy):
    """The strategy that wraps every model with trainable parameters in `DistributedDataParallel`.

    Args:
        sync: Averages the gradients of each step.
    """

    sync: DDPSync

    def __init__(self, sync: DDPSync | None = None) -> None:
        super().__init__(sync or DDPSync())
        self._wrapped: list[_WrappedModel] = []

    def wrap(
        self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any], init_sync: bool = True
    ) -> torch.nn.Module:
        """Wrap a model, copy rank 0's weights to the other ranks, and return the wrapper.

        If `shares_frozen` is False, frozen parameters are not copied. A model without trainable parameters is not
        wrapped. The method then returns the model itself.

        Args:
            model: Model on this rank's device.
            device_ids: Argument of `DistributedDataParallel`.
            options: Further arguments of `DistributedDataParallel`, and the user's communication hook.
            init_sync: False to skip copying the weights. Has no effect if `shares_frozen` is False, or if the model has
                no trainable parameters.
        """
        covered = trainable(model)
        if not covered:
            return self._leave_out(model)
        options = {"device_ids": device_ids, **options}
        hook = options.pop(COMM_HOOK, None)
        if not self.shares_frozen:
            take_from_first((*covered, *model.buffers()))
            init_sync = False
        wrapped = DistributedDataParallel(model, init_sync=init_sync, **options)
        require_names(wrapped, "require_forward_param_sync", "require_backward_grad_sync")  # set by this class
        require_names(wrapped, "parameters_to_ignore", "process_group")
        check_group(wrapped, options)
        if hook is not None:
            self.sync.register(wrapped, options, hook)
        self._wrapped.append(_WrappedModel(wrapped, options, hook, covered))
        return wrapped

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        return next((each.model.parameters_to_ignore for each in self._wrapped if each.model.module is model), None)

    @property
    def obstacle(self) -> str | None:
        return _HOOK_WITH_STATE if any(has_state(each.hook) for each in self._wrapped) else None

    def reform(self) -> None:
        """Reinitialize each wrapper for the new worker group, in place, because user code refers to the wrappers."""
        super().reform()
        for each in self._wrapped:
            self._build_anew(each, init_sync=False)

    def rewrap(self, models: Sequence[torch.nn.Module], is_agreed: bool = False) -> None:
        super().rewrap(models, is_agreed)
        # Rebuild only wrappers that this object created. User code may have wrapped other models itself.
        ours = [each for each in self._wrapped if any(each.model is model for model in models)]
        for each in ours:
            covered = trainable(each.model.module) or _with_gradients(each.model.module)
            if is_agreed and [*map(id, covered)] == [*map(id, each.covered)]:
                continue
            if not is_agreed and has_state(each.hook):
                raise ValueError(
                    f"`self.rewrap()` cannot wrap a model again, because {_HOOK_WITH_STATE}: freeze and unfreeze in "
                    "`setup`, or use a hook without a state."
                )
            each.covered = covered
            if not (is_agreed or self.shares_frozen):
                take_from_first((*covered, *each.model.module.buffers()))
            self._build_anew(each, init_sync=not is_agreed and self.shares_frozen)
        covered_ids = {id(parameter) for each in ours for parameter in each.covered}
        parts = [*(each.model for each in ours), *self.sync.left_out]
        self.sync.uncovered = [p for part in parts for p in part.parameters() if id(p) not in covered_ids]

    def _build_anew(self, each: _WrappedModel, init_sync: bool) -> None:
        wrapped = each.model
        # Keep attributes that every module has, such as hooks and the training mode. User code may have set them.
        kept = {name: vars(wrapped)[name] for name in vars(torch.nn.Module())}
        with _training_only(each.covered, wrapped.module):
            wrapped.__init__(wrapped.module, init_sync=init_sync, **each.options)  # type: ignore[misc]
        vars(wrapped).update(kept)
        if self.sync.is_hooked(wrapped):
            self.sync.register(wrapped, each.options, each.hook)

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Install a communication hook on each model that has none yet.

        The hook weights the model's gradients, all-reduces them, and records whether the all-reduce succeeds.

        Raises:
            ValueError: The user registered a communication hook on a model, and PyTorch allows only one per model. Or
                the user wrapped a model with a `process_group`.
        """
        for model in wrappers(models):
            if not self.sync.is_hooked(model):
                self.sync.register(model, next((each.options for each in self._wrapped if each.model is model), {}))

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Copy rank 0's buffers to every rank, then evaluate in the `with` block without collectives in forward passes.

        Ranks may then have different numbers of batches.
        """
        wrapped = wrappers(models)
        self._repeat_buffers(wrapped)
        before = [model.require_forward_param_sync for model in wrapped]
        try:
            for model in wrapped:
                model.require_forward_param_sync = False
            yield
        finally:
            for model, flag in zip(wrapped, before, strict=True):
                model.require_forward_param_sync = flag


def _with_gradients(model: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """Return all parameters whose dtype allows gradients.

    The wrapper of a fully frozen model is created as if these were trainable, because `DistributedDataParallel` rejects
    a model without trainable parameters.
    """
    return tuple(each for each in model.parameters() if each.is_floating_point() or each.is_complex())


@contextmanager
def _training_only(covered: Iterable[torch.nn.Parameter], model: torch.nn.Module) -> Iterator[None]:
    """Set `requires_grad` to True only for the `covered` parameters of a model, during the `with` block."""
    before, ids = [(each, each.requires_grad) for each in model.parameters()], {*map(id, covered)}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in ids)
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
