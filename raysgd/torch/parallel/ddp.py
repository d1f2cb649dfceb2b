"""Replicas that `DistributedDataParallel` keeps equal, also where the group or the frozen parameters change."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.parallel import ddp_hooks
from raysgd.torch.parallel.step import never_defer
from raysgd.torch.parallel.strategy import NoParallel, quick_group, repeat_first, trainable

# What a module is given from outside, and what making it again would clear.
_KEPT_BY_WRAPPER = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(eq=False)
class _WrappedModel:
    """A model that `DistributedDataParallel` was put around.

    Attributes:
        model: The wrapper.
        options: What it was made with.
        covered: The parameters whose gradients it averages: those that were not frozen when it was made.
    """

    model: DistributedDataParallel
    options: dict[str, Any]
    covered: tuple[torch.nn.Parameter, ...]

    def fits(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Tells whether it does for what the model trains now; else it must be made again.

        It waits for gradients of parameters that were frozen since, unless it was told to look for unused ones. One
        around a model that is all frozen waits for nothing: models are frozen for a part of each batch, too.
        """
        now = [parameter for parameter in parameters if parameter.requires_grad]
        if not now or _are_same(now, self.covered):
            return True
        is_more = not {*map(id, now)} <= {*map(id, self.covered)}
        return not is_more and self.model.find_unused_parameters


class DDP(NoParallel):
    """`DistributedDataParallel` around every model that has something to train.

    Args:
        tells_rows: See `NoParallel`.
    """

    synchronizes = True

    def __init__(self, tells_rows: bool = False) -> None:
        super().__init__(tells_rows=tells_rows)
        self.step.count_ranks, self.step.start_sum = dist.get_world_size, self._start_sum
        self._wrapped: list[_WrappedModel] = []
        self._armed: set[int] = set()
        self._numbers: dict[int, int] = {}  # by identity of wrappers: the order in which they came
        self._uncovered: list[torch.nn.Parameter] = []

    def wrap(
        self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any], init_sync: bool = True
    ) -> torch.nn.Module:
        """Puts a model into the wrapper; without `init_sync` it takes over nothing from the first rank."""
        covered = trainable(model)
        if not covered:
            return self._leave_out(model, options.get("process_group"))
        options = {"device_ids": device_ids, **options}
        wrapped = DistributedDataParallel(model, init_sync=init_sync, **ddp_hooks.without_hook(options))
        self._register_hook(wrapped, options)
        self._wrapped.append(_WrappedModel(wrapped, options, covered))
        return wrapped

    def _register_hook(self, wrapped: DistributedDataParallel, options: dict[str, Any]) -> None:
        number = self._numbers.setdefault(id(wrapped), len(self._numbers) + 1)
        work = f"model {number} exchanged gradients"
        ddp_hooks.register(self, wrapped, options, id(wrapped) in self._armed, work)

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        own = (each for each in self._wrapped if "process_group" not in each.options)
        return next((each.model.parameters_to_ignore for each in own if each.model.module is model), None)

    @property
    def obstacle(self) -> str | None:
        if any("process_group" in each.options for each in self._wrapped):
            return "`ddp_args` names another process group"
        return next(filter(None, (ddp_hooks.obstacle(each.model, each.options) for each in self._wrapped)), None)

    @property
    def weights_obstacle(self) -> str | None:
        is_other = any("process_group" in each.options for each in self._wrapped)
        return 'ddp_args={"process_group": ...}' if is_other else None

    def reform(self) -> None:
        """Builds each wrapper again around the same model, as the same object: user code keeps a reference."""
        super().reform()
        for each in self._wrapped:
            self._build_anew(each, init_sync=False)

    def _build_anew(self, each: _WrappedModel, init_sync: bool) -> None:
        wrapped = each.model
        kept = {name: wrapped.__dict__[name] for name in _KEPT_BY_WRAPPER if name in wrapped.__dict__}
        with _something_to_train(wrapped.module):
            each.covered = trainable(wrapped.module)
            wrapped.__init__(wrapped.module, init_sync=init_sync, **ddp_hooks.without_hook(each.options))  # type: ignore[misc]
        wrapped.__dict__.update(kept)
        self._register_hook(wrapped, each.options)

    def match(self, models: Sequence[torch.nn.Module], votes: Sequence[bool] = ()) -> list[float]:
        """Builds wrappers again whose model trains something else than when they were made.

        The ranks ask each other first: one that builds alone would wait for the others for ever.
        """
        left_out = [model for model, _ in self._left_out]
        ours = {*map(id, left_out), *(id(each.model) for each in self._wrapped)}  # others are the user's to wrap
        parameters = {id(model): tuple(model.parameters()) for model in models if id(model) in ours}
        here = [each for each in self._wrapped if id(each.model) in parameters]
        everything = [parameter for part in parameters.values() for parameter in part]
        fits, sums = self._agree([each.fits(parameters[id(each.model)]) for each in here], everything, votes)
        super().match(models)
        for each in (each for each, fits_everywhere in zip(here, fits, strict=True) if not fits_everywhere):
            obstacle = ddp_hooks.obstacle(each.model, each.options)
            if obstacle is not None:
                raise ValueError(
                    f"Parameters were frozen or unfrozen since `register`, and {obstacle}, which would not fit the "
                    "others: freeze before `register`, or use a hook without a state."
                )
            self._build_anew(each, init_sync=True)
        covered = {id(parameter) for each in here for parameter in each.covered}
        self._uncovered = [parameter for parameter in everything if id(parameter) not in covered]
        return sums

    def _agree(
        self, fits: list[bool], parameters: Iterable[torch.nn.Parameter], votes: Sequence[bool]
    ) -> tuple[list[bool], list[float]]:
        """Of each wrapper, whether all ranks say that it fits; and the sums of their votes.

        Raises:
            ValueError: The ranks train different parameters.
        """
        flags = bytes(parameter.requires_grad for parameter in parameters)
        own = zlib.crc32(flags) >> 8  # short, so that sums of squares are exact
        numbers = torch.tensor([own, own**2, *votes, *fits], device=_reachable())
        self.all_sum(numbers)
        total, squares, *counts = numbers.tolist()
        sums, counts = counts[: len(votes)], counts[len(votes) :]
        if squares * dist.get_world_size() != total**2:  # they are equal if all that was added up is
            raise ValueError(
                "The workers have frozen different parameters (`requires_grad`), so their gradients do not fit "
                "together: freeze and unfreeze the same parameters on all of them, whatever the rank."
            )
        return [count == dist.get_world_size() for count in counts], sums

    def _check_step(self, came_through: Callable[[], None]) -> None:
        came_through()
        if any(parameter.requires_grad for parameter in self._uncovered):
            raise ValueError(
                "Parameters were unfrozen (`requires_grad=True`) in the middle of a pass, and their gradients were not "
                "averaged over the workers. Unfreeze them between two calls of `train`, with `apply_all_operators`, or "
                "in `train_epoch` before the first batch is drawn."
            )

    def arm(
        self, models: Sequence[torch.nn.Module], weight_in_hook: bool, window: int = 1, may_defer: bool = True
    ) -> None:
        """Installs a hook where it is of use: for weighting and watching gradients, or for speed.

        A model for which the user registered a hook of his own by hand keeps that one; PyTorch allows one each.
        """
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        self.step.defer = _deferrer(wrapped) if may_defer else never_defer
        super().arm(models, weight_in_hook, window)
        self.step.check = partial(self._check_step, self.step.check)
        self.weights_in_hook = self.weights_in_hook or weight_in_hook
        for model in wrapped:
            self._armed.add(id(model))
            if not model._comm_hooks:
                self._register_hook(model, {})

    def _start_sum(self, number: float) -> Callable[[], float]:
        # In the group of the gradients: there it comes right before those of the same backward pass, on every rank. Or
        # behind them, where it takes no longer than to begin it.
        numbers = torch.tensor([number], dtype=torch.float64, device=_reachable())
        if quick_group(numbers) is not None:
            return partial(self._sum_of, partial(self.all_sum, numbers), numbers)
        with self.exchanges.noting():
            work = dist.all_reduce(numbers, async_op=True)
        return partial(self._sum_of, work.wait, numbers)

    def _sum_of(self, wait: Callable[[], Any], numbers: torch.Tensor) -> float:
        with self.exchanges.noting():
            wait()
        return numbers.item()

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        groups = {id(p): each.model.process_group for each in self._wrapped for p in each.model.parameters()}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        self.step.exchanges()
        has_gradient = torch.tensor([float(each.grad is not None) for each in trained], device=_reachable())
        with self.exchanges.noting():
            self.all_sum(has_gradient)
            used = [parameter for parameter, count in zip(trained, has_gradient.tolist(), strict=True) if count]
            for parameter in used:
                if parameter.grad is None:  # of this rank; others have one
                    parameter.grad = torch.zeros_like(parameter)
                group = groups.get(id(parameter), dist.group.WORLD)
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(dist.get_world_size(group))

    @contextmanager
    def further_pass(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Exchanges what `DistributedDataParallel` does not: it exchanges gradients once after each forward pass.

        Gradients that were averaged before are alike on all ranks, and stay as they are in another average.
        """
        self.exchanged.clear()
        with super().further_pass(parameters):
            yield
        if self.step.is_boundary:
            models = [{*map(id, each.model.parameters())} for each in self._wrapped]
            done = set().union(*(ids for ids in models if ids & self.exchanged))
            self.exchange([parameter for parameter in parameters if id(parameter) not in done])

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Gives every rank those of the first one once, then keeps forward passes free of collectives."""
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        for model in wrapped:
            repeat_first(model.module.buffers(), model.process_group)
        self._refresh_left_out()
        before = [model.require_forward_param_sync for model in wrapped]
        try:
            for model in wrapped:
                model.require_forward_param_sync = False
            yield
        finally:
            for model, flag in zip(wrapped, before, strict=True):
                model.require_forward_param_sync = flag


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


@contextmanager
def _something_to_train(model: torch.nn.Module) -> Iterator[None]:
    """Unfreezes a model for a moment if all of it is frozen, which `DistributedDataParallel` refuses."""
    frozen = [] if trainable(model) else [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _reachable() -> torch.device | None:
    """Returns where numbers have to be that the default group adds up; None for the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None


def _deferrer(models: Sequence[DistributedDataParallel]) -> Callable[[bool], None]:
    """Returns what `DistributedDataParallel.no_sync` does, for a batch instead of a block of code."""

    def defer(is_deferred: bool) -> None:
        for model in models:
            model.require_backward_grad_sync = not is_deferred

    return defer
