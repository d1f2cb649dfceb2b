"""Computes an operator's gradients, weights them, averages them over batches and workers, and steps the optimizers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from raysgd.core.text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.scale import Items, Scale
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

logger = logging.getLogger(__name__)


_NOTHING = nullcontext()


def _silenced(parameters: Iterable[torch.Tensor]) -> ExitStack:
    """Return a context manager that sets gradients to 0. Used for a batch with weight 0, because its loss may be NaN.

    Hooks on the parameters replace the gradients. A hook may get None instead of a gradient: with
    `find_unused_parameters=True`, `DistributedDataParallel` passes None for outputs that no loss uses.
    """
    handles = ExitStack()
    for tensor in parameters:
        if tensor.requires_grad:
            handles.enter_context(tensor.register_hook(lambda each: None if each is None else torch.zeros_like(each)))
    return handles


class Gradients:
    """Computes the gradients of optimizer steps, and steps the optimizers.

    A step's gradient equals the gradient of one large batch with all samples of the step. These are the samples of all
    accumulated batches on all ranks.

    Hooks on the optimizers clip gradients before each step, and tell callbacks, even if user code calls
    `optimizer.step()` itself (ADR 23).

    Args:
        operator: The operator, whose `clip_grad_norm` and `clip_grad_value` clip the gradients.
        precision: Numeric precision of the training. It scales and unscales gradients.
        parallel: Strategy of the worker, whose `leg` tracks the current batch.
        options: Options for clipping.
        callbacks: The worker's callbacks.
        once: Remembers which warnings were logged.
    """

    def __init__(
        self,
        operator: Any,
        precision: Precision,
        parallel: Strategy,
        options: StepOptions,
        callbacks: InstalledCallbacks,
        once: Once,
    ) -> None:
        self._operator, self._precision, self._parallel = operator, precision, parallel
        self._options, self._callbacks, self._once = options, callbacks, once
        self._optimizers: Sequence[Any] = ()
        self._undo: list[Callable[[], None]] = []
        self._is_stepping = False  # the library itself steps
        self._about_to_step: set[int] = set()  # IDs of the optimizers whose current step has gradients

    # ------------------------------------------------------------------------------------ backward passes

    def compute(
        self,
        loss: torch.Tensor,
        chosen: list[Any],
        bystanders: list[Any],
        weight: Any,
        trained: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """Compute the gradients of a loss. Clear old gradients first, unless the new gradients add to them.

        Args:
            loss: The batch's loss, a mean over its samples or over the units that its weight counts.
            chosen: Optimizers that the loss trains.
            bystanders: Other optimizers whose gradients are also cleared, because the batch has no other loss.
            weight: The batch's weight from user code; None if user code passed no weight.
            trained: Function that returns all trained parameters.
        """
        leg, cleared, is_given = self._parallel.leg, [*chosen, *bystanders], weight is not None
        scale_again = self._precision.scale_again
        unscaled = [each for each in cleared if scale_again(each)] if self._precision.is_mixed else []
        # Without other batches in the step, on this rank or on others, the weight of the batch does not matter.
        if not (is_given or leg.rules.weighs):
            self._clear(chosen, bystanders)
            leg.note_backward(cleared)
            if self._parallel.has_others:
                leg.ledger.end_own_work()
            self._precision.backward(loss, chosen[0])
        else:
            weight = leg.items.of_loss(loss, weight)
            self._clear(chosen, bystanders)
            with _silenced(trained()) if isinstance(weight, float) and not weight else _NOTHING:
                self._compute_weighted(loss, cleared, weight, is_given)
        if leg.plan.sync_gradients and self._parallel.synchronizes:
            leg.record.wait()
        for each in unscaled:  # a user's `optimizer_step` computes these gradients
            self._precision.unscale(each)

    def _compute_weighted(self, loss: torch.Tensor, cleared: list[Any], own: Any, is_given: bool) -> None:
        """Compute the gradients of a batch whose weight matters, as the table in `raysgd.torch.parallel.scale` says.

        Args:
            loss: Loss of the batch.
            cleared: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds. The loss
                trains the first one.
            own: Items of the batch; None to weight it by its number of samples.
            is_given: True if the items come from user code.
        """
        parallel, leg, items = self._parallel, self._parallel.leg, None
        had_one = leg.note_backward(cleared, by_samples=own is None)
        is_second = had_one and leg.rules.averages and not leg.rules.num_shards
        leg.ledger.end_own_work()
        if leg.rules.has_several:
            scale = Scale(leg.add_up(own, parallel.num_ranks, is_of_criterion=not is_given))
        elif own is None:
            scale = Scale(leg.plan.sample_weight) if is_second else leg.scale
        else:
            items = Items(own, leg.typical_items, parallel.num_ranks, parallel.start_total(own))
            scale = Scale(items.factor()) if is_second else Scale(items=items)
        parameters = (parameter for each in cleared for parameter in self._precision.parameters(each))
        with parallel.backward_pass(scale, parameters, is_second):
            self._precision.backward(loss if scale.loss is None else loss * scale.loss, cleared[0])
        if leg.accumulation is not None:
            leg.accumulation.see(self._versions(cleared[0]))
        if items is not None:
            total = items.total if is_given or items.is_known else None
            if is_given and total == 0.0:  # user code passed weight 0 on all ranks
                self._leave_out(cleared)
            elif not isinstance(total, torch.Tensor) and total:
                leg.learn_items(total / parallel.num_ranks)

    def _clear(self, chosen: Sequence[Any], bystanders: Sequence[Any]) -> None:
        """Clear the gradients of optimizers, except gradients to which this batch adds.

        Args:
            chosen: Optimizers that the loss trains.
            bystanders: Other optimizers. Their gradients are cleared if the first chosen optimizer's are cleared.

        Raises:
            ValueError: Gradients to which the batch must add were cleared, or an optimizer may already have stepped
                with these gradients.
        """
        leg, stale = self._parallel.leg, []
        for each in chosen:
            if leg.adds_to(each):
                self._check_waiting(each)
            else:
                stale.append(each)
        for each in [*stale, *(bystanders if chosen[0] in stale else ())]:
            each.zero_grad()

    def _check_waiting(self, optimizer: Any) -> None:
        """Check that a loss can add to the gradients that an optimizer's parameters already have.

        The library cannot notice the steps of an optimizer that is not registered or does not support hooks.

        Raises:
            ValueError: These gradients were cleared, or the optimizer may already have stepped with them.
        """
        leg = self._parallel.leg
        if not leg.rules.has_several and not self._sees(optimizer):
            raise ValueError(
                f"`self.backward` was called again for a batch, and it is unknown whether `{type(optimizer).__name__}` "
                "has stepped, which is not registered or no `torch.optim.Optimizer`: call `self.optimizer_step()` to "
                "step it, or add the losses up and call `self.backward` once."
            )
        if leg.rules.has_several and self._parallel.are_cleared(self._precision.parameters(optimizer)):
            raise ValueError(
                f"`{leg.rules.option}`: the gradients of earlier batches of this step are gone. `self.backward` clears "
                "gradients where a step begins: remove `zero_grad()` from `train_batch`. To leave a batch out, "
                "multiply its loss by 0."
            )
        self._check_unchanged(optimizer)

    def _check_unchanged(self, optimizer: Any) -> None:
        """Check that user code has not changed accumulated gradients since the latest backward pass.

        Raises:
            ValueError: It has changed them, for example to clip them.
        """
        added = self._parallel.leg.accumulation
        if added is not None and added.seen not in (None, self._versions(optimizer)):
            raise ValueError(
                f"`{self._parallel.leg.rules.option}`: gradients were changed after `self.backward`, where they are "
                "not the means over the samples of the step yet. Change them in your own `optimizer_step`, before "
                "`super().optimizer_step()`, or pass `clip_grad_norm` or `clip_grad_value` to the trainer."
            )

    def _versions(self, optimizer: Any) -> list[tuple[int, int]]:
        gradients = [each.grad for each in self._precision.parameters(optimizer) if each.grad is not None]
        return [(id(each), getattr(each, "_version", 0)) for each in gradients]

    # ------------------------------------------------------------------------------------ steps

    def complete(self, optimizer: Any) -> None:
        """Average the accumulated gradients over all batches of a step.

        If the total weight of the batches is 0, clear the gradients, so that the optimizer does not step. However, if
        the weight is 0 because the loss ignores all labels, keep gradients of 0, as in a single process.

        A second call for the same step does nothing.
        """
        leg, num_ranks = self._parallel.leg, self._parallel.num_ranks
        added = leg.accumulation
        if added is None or added.is_complete:
            return
        self._check_unchanged(optimizer)
        parameters = self._precision.parameters(optimizer)
        added.complete()
        if not added.is_averaged:
            self._parallel.average_deferred(parameters)
        total = added.num_samples
        if added.is_weighted:
            total = float(self._parallel.start_total(added.own)())
            leg.learn_items(total / num_ranks / added.num_batches)
        correction = added.correction(total, num_ranks)
        if correction == 0.0:
            if not added.is_of_criterion:
                self._leave_out([optimizer])
        elif correction != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)

    def skip(self, optimizer: Any) -> None:
        """Leave a batch out of its step, as user code on a single worker wants."""
        leg = self._parallel.leg
        leg.end_waiting()
        if leg.rules.has_several:
            leg.add_up(None, 1, is_skipped=True)
        elif optimizer is not None:
            self._leave_out([optimizer])

    def _leave_out(self, optimizers: Iterable[Any]) -> None:
        """Clear the optimizers' gradients and skip their step, because all batches have weight 0. Warn once."""
        for each in optimizers:
            self._parallel.leg.batch.skipped.add(id(each))
            for parameter in self._precision.parameters(each):
                parameter.grad = None
        if self._once.is_first("nothing counts"):
            logger.warning(
                "nothing counts in a step: all workers gave `weight=0`, or left their batches out. The optimizer does "
                "not step then. Later steps like this one are not reported"
            )

    def are_ready(self, optimizers: Iterable[Any]) -> bool:
        """Return True if a step is due. Its gradients are then unscaled means over all samples of the step.

        Called before a user's `optimizer_step`. With gradient accumulation, a step is due in its last batch only.
        """
        leg = self._parallel.leg
        leg.batch.ask_to_step(leg.rules.has_several)
        for optimizer in optimizers if leg.plan.sync_gradients else ():
            self.complete(optimizer)
            self._precision.unscale(optimizer)
        return leg.plan.sync_gradients

    def apply(self, optimizers: Iterable[Any], before: Callable[[Any], None] | None = None) -> None:
        """Step the optimizers if the current batch is the last batch of an optimizer step.

        Args:
            optimizers: Optimizers to step.
            before: Function that gets each optimizer before it steps, with the averaged, unscaled gradients.
        """
        leg = self._parallel.leg
        for optimizer in optimizers:
            if leg.rules.has_several:
                leg.batch.ask_to_step()
            if not leg.plan.sync_gradients:
                continue
            if leg.rules.has_several:
                self.complete(optimizer)
            if id(optimizer) not in leg.batch.skipped:
                if before is not None:
                    self._precision.unscale(optimizer)
                    before(optimizer)
                self._step(optimizer)
            leg.stepped(optimizer)

    def _step(self, optimizer: Any) -> None:
        """Step an optimizer. If options or callbacks require it, first unscale, report and clip the gradients."""
        if self._options.clips or self._callbacks.wants_gradients:
            self._precision.unscale(optimizer)
            self._clip(optimizer)
        self._is_stepping = True
        try:
            self._precision.step(optimizer)
        finally:
            self._is_stepping = False

    # ------------------------------------------------------------------------------------ hooks on optimizers

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Install hooks on the optimizers' steps, so that gradients are clipped even if user code calls `step`.

        Hooks and listeners from before this call are removed.
        """
        for undo in self._undo:
            undo()
        self._optimizers = optimizers
        hooked = list(filter(tells_of_steps, optimizers))
        handles = [each.register_step_pre_hook(self._before_step) for each in hooked]
        handles += [each.register_step_post_hook(self._after_step) for each in hooked]
        self._undo = [each.remove for each in handles]

    def tell(self, listener: Callable[..., object]) -> None:
        """From now on, call a function before each step of an optimizer.

        Call this method after `setup`, so that PyTorch calls the listener after the user's hooks. If a user's hook
        raises, the optimizer does not step, and the listener is not called.

        Args:
            listener: Function that gets the arguments of PyTorch's step hooks, the first of which is the optimizer. It
                also gets the keyword argument `number`, which numbers the optimizers with hooks from 1.
        """
        for number, each in enumerate(filter(tells_of_steps, self._optimizers), start=1):
            self._undo.append(each.register_step_pre_hook(partial(listener, number=number)).remove)

    def _sees(self, optimizer: Any) -> bool:
        """Return True if `optimizer` has the hooks, so that every one of its steps is noticed."""
        return tells_of_steps(optimizer) and any(each is optimizer for each in self._optimizers)

    @property
    def may_miss_clipping(self) -> bool:
        """True if an optimizer does not support hooks, so that user code may step it without clipping."""
        return self._options.clips and not all(map(tells_of_steps, self._optimizers))

    def _clip(self, optimizer: Any) -> None:
        if self._callbacks.wants_gradients:
            self._callbacks.gradients(optimizer)
        if not self._options.clips:
            return
        options = self._options
        self._parallel.leg.note_clipped()
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            norm = self._operator.clip_grad_norm(parameters, options.clip_grad_norm)
            self._callbacks.note_norm(norm)
        if options.clip_grad_value is not None:
            self._operator.clip_grad_value(parameters, options.clip_grad_value)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass an optimizer's gradients to callbacks and clip them. PyTorch calls this hook before each step.

        If the library itself steps the optimizer, `_step` has already done this.

        If the step has a closure, return the step's arguments with a new closure, which clips the gradients after each
        call to the old closure. Otherwise, return None, so that the arguments stay unchanged.

        Raises:
            ValueError: The step has a closure, although gradients are averaged over ranks or accumulated over batches.
                A closure computes gradients from a single batch of this rank. Or user code steps the optimizer,
                although its gradients wait for more batches.
        """
        self._about_to_step.discard(id(optimizer))
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if not self._is_stepping or self._callbacks.wants_steps or self._precision.is_mixed:
                self._check_gradients(optimizer)
            return None

        name, leg = type(optimizer).__name__, self._parallel.leg
        if leg.rules.averages:
            raise ValueError(
                f"`{name}.step` was given a closure, which an optimizer calls as often as this worker's loss makes "
                "it, and the workers would step differently: use one worker, or an optimizer that needs no closure, "
                "and call `self.backward(loss)` and `self.optimizer_step()`."
            )
        if leg.rules.has_several or leg.rules.num_shards:
            raise ValueError(
                f"`{name}.step` was given a closure, which computes the gradients of a whole step, and here a step has "
                "several batches: omit `accumulate_grad_batches`, `micro_batch_size` or `deterministic=True`."
            )

        def compute() -> Any:
            self._parallel.leg.stepped(optimizer)  # each call to the closure must start without gradients
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return (optimizer, compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _check_gradients(self, optimizer: Any) -> None:
        if all(parameter.grad is None for parameter in self._precision.parameters(optimizer)):
            return  # a step without gradients changes nothing; some programs step once before they step a scheduler
        leg = self._parallel.leg
        if not self._is_stepping and leg.rules.has_several and leg.adds_to(optimizer):
            raise ValueError(
                f"`{leg.rules.option}`: your code calls `step` of `{type(optimizer).__name__}`, and its gradients "
                "wait for more batches: call `self.optimizer_step()` for every batch instead."
            )
        self._about_to_step.add(id(optimizer))
        if not self._is_stepping:
            leg.items.check_labels()
            if self._parallel.synchronizes:
                leg.record.wait()
        self._precision.check_use()
        if not self._is_stepping and (self._options.clips or self._callbacks.wants_gradients):
            _unscale_for_step(optimizer)
            self._clip(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Record an optimizer's step and notify callbacks. PyTorch calls this hook after each step."""
        if not self._is_stepping:  # for steps by the library, `Gradients.apply` calls `leg.stepped`
            self._parallel.leg.stepped(optimizer)
        if not self._callbacks.wants_steps or id(optimizer) not in self._about_to_step:
            return
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the update if this is not 0
        if overflow is None or not overflow.item():
            self._callbacks.stepped(optimizer)


def backward_with(operator: Any, loss: torch.Tensor, weight: Any) -> None:
    """Call the operator's `backward` with the batch's weight that `forward` returned.

    Raises:
        TypeError: The user's override of `backward` does not accept the argument `weight`.
    """
    if not _takes(operator.backward, "weight"):
        raise TypeError(
            f"`{type(operator).__name__}.forward` returned a weight, but its `backward` does not take one: write "
            "`def backward(self, loss, **options)` and pass the options on to `super().backward(loss, **options)`."
        )
    operator.backward(loss, weight=weight)


def step_with(operator: Any, optimizer: Any) -> None:
    """Call the operator's `optimizer_step`, with `optimizer` if the user's override accepts that argument."""
    arguments = (optimizer,) if _takes(operator.optimizer_step, "optimizer") else ()
    operator.optimizer_step(*arguments)


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def tells_of_steps(optimizer: Any) -> bool:
    """Return True if an optimizer supports PyTorch's hooks before and after a step."""
    return hasattr(optimizer, "register_step_post_hook") and hasattr(optimizer, "register_step_pre_hook")


def _unscale_for_step(optimizer: Any) -> None:
    """Unscale the gradients of a fused optimizer before its step, so that they can be clipped.

    A fused optimizer would otherwise unscale its gradients during the step, after they were clipped.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    optimizer.grad_scale = None
