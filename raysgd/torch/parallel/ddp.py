"""The strategy "ddp": `DistributedDataParallel` keeps the workers' models in sync, even if the worker group changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.private_names import require_names
from raysgd.torch.parallel import ddp_sync
from raysgd.torch.parallel.ddp_sync import DDPSync, wrappers
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.tensors import take_from_first, trainable


@dataclass(eq=False)
class _WrappedModel:
    """A model in a `DistributedDataParallel` wrapper.

    Attributes:
        model: The wrapper, which contains the model.
        options: Arguments that the wrapper was created with.
        covered: Parameters whose gradients the wrapper averages. They were trainable when the wrapper was created, or
            at the last `rewrap`. If no parameter was trainable at the last `rewrap`, see `_with_gradients`.
    """

    model: DistributedDataParallel
    options: dict[str, Any]
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
        if not self.shares_frozen:
            take_from_first((*covered, *model.buffers()))
            init_sync = False
        wrapped = DistributedDataParallel(model, init_sync=init_sync, **ddp_sync.without_hook(options))
        require_names(wrapped, "require_forward_param_sync", "require_backward_grad_sync")  # set by this class
        require_names(wrapped, "parameters_to_ignore", "process_group")
        ddp_sync.check_group(wrapped, options)
        if options.get(ddp_sync.COMM_HOOK) is not None:
            self.sync.register(wrapped, options)
        self._wrapped.append(_WrappedModel(wrapped, options, covered))
        return wrapped

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        return next((each.model.parameters_to_ignore for each in self._wrapped if each.model.module is model), None)

    @property
    def obstacle(self) -> str | None:
        return next(filter(None, (ddp_sync.obstacle(each.options) for each in self._wrapped)), None)

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
            obstacle = None if is_agreed else ddp_sync.obstacle(each.options)
            if obstacle is not None:
                raise ValueError(
                    f"`self.rewrap()` cannot wrap a model again, because {obstacle}: freeze and unfreeze in `setup`, "
                    "or use a hook without a state."
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
            wrapped.__init__(wrapped.module, init_sync=init_sync, **ddp_sync.without_hook(each.options))  # type: ignore[misc]
        vars(wrapped).update(kept)
        if self.sync.is_hooked(wrapped):
            self.sync.register(wrapped, each.options)

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
