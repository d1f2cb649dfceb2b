"""Computes an operator's gradients, weights them, averages them over batches and workers, and steps the optimizers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from raysgd.core.text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.leg import Items
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.sync import GradientSync
from raysgd.trainer.worker.operator import required
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

logger = logging.getLogger(__name__)

Run = Callable[[torch.Tensor], None]
"""Runs the backward pass of a loss."""

_NOTHING = nullcontext()


class Gradients:
    """Computes the gradients of optimizer steps, and steps the optimizers.

    A step's gradient equals the gradient of one large batch with all samples of the step. These are the samples of all
    accumulated batches on all ranks. Hooks on the optimizers clip gradients before each step, and tell callbacks, even
    if user code calls `optimizer.step()` itself (ADR 23).

    The operator's `backward` and `optimizer_step` act on the first of these that exists:

    - the optimizer, or list of optimizers, that user code passes as the argument `optimizer`
    - `self.optimizer`, if only one optimizer is registered, or if a library method, such as the default `train_batch`,
      calls them

    Args:
        operator: The operator, whose `clip_grad_norm` and `clip_grad_value` clip the gradients.
        precision: Numeric precision of the training. It scales and unscales gradients.
        sync: Averages the gradients of each step. Its `leg` tracks the current batch.
        options: Options for clipping.
        callbacks: The worker's callbacks.
        once: Remembers which warnings were logged.
    """

    def __init__(
        self,
        operator: Any,
        precision: Precision,
        sync: GradientSync,
        options: StepOptions,
        callbacks: InstalledCallbacks,
        once: Once,
    ) -> None:
        self._operator, self._precision, self._sync = operator, precision, sync
        self._options, self._clips, self._callbacks, self._once = options, options.clips, callbacks, once
        self._optimizers: Sequence[Any] = ()
        self._handles: list[Any] = []  # of the hooks on optimizers
        self._is_usual = False  # a library method calls `backward` or `optimizer_step`
        self._is_stepping = False  # the library itself steps
        self._about_to_step: set[int] = set()  # IDs of the optimizers whose current step has gradients

    # ------------------------------------------------------------------------------------ which optimizers

    def acting_on_usual(self) -> AbstractContextManager[None]:
        """Let `backward` and `optimizer_step` act on `self.optimizer` in the `with` block.

        If user code passes the argument `optimizer`, this argument takes precedence. A user's override of `backward` or
        `optimizer_step` may lack the parameter `optimizer`. When it calls the original method, that method still acts
        on the right optimizer.
        """
        return self._acting_on_usual() if len(self._optimizers) > 1 else _NOTHING

    @contextmanager
    def _acting_on_usual(self) -> Iterator[None]:
        before, self._is_usual = self._is_usual, True
        try:
            yield
        finally:
            self._is_usual = before

    def chosen(self, method: str, given: Any) -> list[Any]:
        """Return the optimizers that a method acts on.

        Args:
            method: Name of the method, for errors.
            given: Value of the method's argument `optimizer`: an optimizer, a list of optimizers, or None.

        Raises:
            ValueError: It is unclear which optimizers the method should act on.
        """
        if given is None and (self._is_usual or len(self._optimizers) <= 1):
            return [required(self._operator, "optimizer")]
        if given is None:
            arguments = "loss, " if method == "backward" else ""
            raise ValueError(
                f"`self.{method}` was called without `optimizer`, and {len(self._optimizers)} optimizers are "
                f"registered: pass the one that it is for, as in `self.{method}({arguments}optimizer=self.optimizer)`, "
                "or a list of them. The gradients of the others would add up."
            )
        chosen = list(given) if isinstance(given, list | tuple) else [given]
        if not chosen or not all(hasattr(each, "zero_grad") and hasattr(each, "step") for each in chosen):
            raise ValueError(f"`optimizer={given!r}`: pass an optimizer that `register` returned, or a list of them.")
        return chosen

    def registered(self, given: Any) -> Sequence[Any]:
        """Return the registered optimizers that a call to a user's `optimizer_step` is for. Empty if that is unclear.

        Args:
            given: First argument of the call; None if it has no argument.
        """
        if len(self._optimizers) == 1:
            return self._optimizers
        given = required(self._operator, "optimizer") if given is None and self._is_usual else given
        chosen = given if isinstance(given, list | tuple) else [given]
        return [each for each in self._optimizers if any(each is one for one in chosen)]

    # ------------------------------------------------------------------------------------ hooks on optimizers

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Install hooks on the optimizers' steps, so that gradients are clipped even if user code calls `step`.

        Hooks from before this call are removed.
        """
        for handle in self._handles:
            handle.remove()
        self._optimizers = optimizers
        hooked = list(filter(tells_of_steps, optimizers))
        self._handles = [each.register_step_pre_hook(self._before_step) for each in hooked]
        self._handles += [each.register_step_post_hook(self._after_step) for each in hooked]

    def watch_last(self) -> None:
        """From now on, record each step of an optimizer in the `leg`.

        Call this method after `setup`, so that PyTorch calls the hook after the user's hooks. If a user's hook raises,
        the optimizer does not step, and nothing is recorded.
        """
        for number, each in enumerate(filter(tells_of_steps, self._optimizers), start=1):
            self._handles.append(each.register_step_pre_hook(partial(self._note_step, number=number)))

    def _note_step(self, optimizer: Any, *_: Any, number: int) -> None:
        leg = self._sync.leg
        if leg.rules.averages:
            leg.flight_recorder.note(f"optimizer {number} stepped")
        leg.record.note_step(optimizer)

    @property
    def may_miss_clipping(self) -> bool:
        """True if an optimizer does not support hooks, so that user code may step it without clipping."""
        return self._clips and not all(map(tells_of_steps, self._optimizers))

    def _clip(self, optimizer: Any) -> None:
        if self._callbacks.wants_gradients and not self._callbacks.gradients(optimizer):
            self._about_to_step.discard(id(optimizer))
            self._skip_step(optimizer)
            return
        if not self._clips:
            return
        options = self._options
        self._sync.leg.note_clipped()
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            norm = self._operator.clip_grad_norm(parameters, options.clip_grad_norm)
            self._callbacks.note_norm(norm)
        if options.clip_grad_value is not None:
            self._operator.clip_grad_value(parameters, options.clip_grad_value)

    def _skip_step(self, optimizer: Any) -> None:
        """Skip an optimizer's next step. If user code still calls `step`, it changes nothing without gradients."""
        self._sync.leg.batch.skipped.add(id(optimizer))
        for parameter in self._precision.parameters(optimizer):
            parameter.grad = None

    def step(self, optimizer: Any) -> None:
        """Step an optimizer. If options or callbacks require it, first unscale, report and clip the gradients."""
        if self._clips or self._callbacks.wants_gradients:
            self._precision.unscale(optimizer)
            self._clip(optimizer)
            if id(optimizer) in self._sync.leg.batch.skipped and not self._precision.is_mixed:
                return  # with mixed precision, the scaler must know of the step
        self._is_stepping = True
        try:
            self._precision.step(optimizer)
        finally:
            self._is_stepping = False

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass an optimizer's gradients to callbacks and clip them. PyTorch calls this hook before each step.

        If the library itself steps the optimizer, `step` has already done this.

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

        name, leg = type(optimizer).__name__, self._sync.leg
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

        if self._callbacks.may_leave_out:
            raise ValueError(
                f"`{name}.step` was given a closure, which computes gradients several times in a step, and `Guard` "
                "decides once whether a step is taken: omit `Guard`, or use an optimizer that needs no closure."
            )

        def compute() -> Any:
            self._sync.leg.stepped(optimizer)  # each call to the closure must start without gradients
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return (optimizer, compute, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _check_gradients(self, optimizer: Any) -> None:
        if all(parameter.grad is None for parameter in self._precision.parameters(optimizer)):
            return  # a step without gradients changes nothing; some programs step once before they step a scheduler
        leg = self._sync.leg
        if not self._is_stepping and leg.rules.has_several and leg.adds_to(optimizer):
            raise ValueError(
                f"`{leg.rules.option}`: your code calls `step` of `{type(optimizer).__name__}`, and its gradients "
                "wait for more batches: call `self.optimizer_step()` for every batch instead."
            )
        self._about_to_step.add(id(optimizer))
        if not self._is_stepping:
            leg.check_labels()
            if self._sync.waits:
                leg.record.wait()
        self._precision.check_use()
        if not self._is_stepping and self._precision.skips_overflows and self._callbacks.may_leave_out:
            raise ValueError(
                f"your code steps `{type(optimizer).__name__}` by a gradient scaler, which skips bad steps, so `Guard` "
                "cannot see them: call `self.backward(loss)` and `self.optimizer_step()` instead, or omit `Guard`."
            )
        if not self._is_stepping and (self._clips or self._callbacks.wants_gradients):
            _unscale_for_step(optimizer)
            self._clip(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Record an optimizer's step and notify callbacks. PyTorch calls this hook after each step."""
        if not self._is_stepping:  # for steps by the library, `Gradients.apply` calls `leg.stepped`
            self._sync.leg.stepped(optimizer)
        if not self._callbacks.wants_steps or id(optimizer) not in self._about_to_step:
            return
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the update if this is not 0
        if overflow is None or not overflow.item():
            self._callbacks.stepped(optimizer)

    # ------------------------------------------------------------------------------------ backward passes

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: Any = None,
        weight: Any = None,
        *,
        run: Run | None = None,
        clears: bool = True,
    ) -> None:
        """Compute the gradients of a loss. Clear old gradients first, unless the new gradients add to them.

        Args:
            loss: The batch's loss, a mean over its samples or over the units that its weight counts.
            optimizer: Optimizer, or list of optimizers, that the loss trains. None if user code passed none. The batch
                then has no other loss, so the gradients of all optimizers are cleared.
            weight: The batch's weight from user code; None if user code passed no weight.
            run: Function that runs the backward pass of the weighted loss. Default: the precision's.
            clears: False if user code itself clears gradients, and may run several backward passes for a batch.

        Raises:
            ValueError: It is unclear which optimizers to act on. Or gradients to which the batch must add were cleared,
                or an optimizer may already have stepped with these gradients.
        """
        sync, leg = self._sync, self._sync.leg
        chosen = self.chosen("backward", optimizer) if clears else [] if optimizer is None else [optimizer]
        cleared = chosen
        if clears and optimizer is None and len(self._optimizers) > 1:
            cleared = [*chosen, *(each for each in self._optimizers if each is not chosen[0])]
        if self._callbacks.may_leave_out:
            loss = self._callbacks.see_loss(loss)
        scale_again = self._precision.scale_again
        unscaled = [each for each in cleared if scale_again(each)] if self._precision.is_mixed else []
        # Without other batches in the step, on this rank or on others, the weight of the batch does not matter.
        is_weighted = weight is not None or leg.rules.weighs
        stale = []
        for each in chosen if clears else ():
            if leg.adds_to(each):
                self._check_waiting(each)
            else:
                stale.append(each)
        for each in [*stale, *(cleared[len(chosen) :] if clears and chosen[0] in stale else ())]:
            each.zero_grad()
        had_one = leg.note_backward(cleared)
        if is_weighted or sync.has_others:
            leg.ledger.end_own_work()
        run = run or partial(self._precision.backward, optimizer=cleared[0])
        if is_weighted:
            is_second = had_one and clears and leg.rules.averages and not leg.rules.num_shards
            self._run_weighted(loss, weight, run, cleared, is_second)
        else:
            run(loss)
        if clears and leg.accumulation is not None:
            leg.accumulation.note_gradients(_versions(self._precision.parameters(cleared[0])))
        if sync.waits and leg.plan.ends_step:
            leg.record.wait()
        for each in unscaled:  # a user's `optimizer_step` computes these gradients
            self._precision.unscale(each)

    def _run_weighted(self, loss: torch.Tensor, weight: Any, run: Run, optimizers: list[Any], is_second: bool) -> None:
        """Run a backward pass whose weight matters, as the table in `raysgd.torch.parallel.leg` says.

        Args:
            loss: See `backward`.
            weight: See `backward`.
            run: Function that runs the backward pass of the weighted loss.
            optimizers: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds.
            is_second: True if `DistributedDataParallel` may not average the gradients, because it already has averaged
                those of this batch.
        """
        sync, leg, rules, plan = self._sync, self._sync.leg, self._sync.leg.rules, self._sync.leg.plan
        own, items = leg.items_of(loss, weight), None
        factor: float | Items = 1.0  # of the gradients
        if rules.weighs:
            leg.use(by_samples=own is None)
        if rules.has_several:
            loss = loss * leg.add_up(own, sync.num_ranks, is_of_criterion=weight is None)
        elif rules.num_shards:
            loss = loss * ((plan.num_samples or 0) / plan.total_samples if plan.total_samples else 0.0)
        elif own is not None:
            items = Items(own, leg.usual_items(sync.num_ranks), sync.num_ranks, sync.start_total(own))
            loss, factor = (loss * items.factor(), factor) if is_second else (loss, items)
        else:
            loss, factor = (loss * plan.weight, factor) if is_second else (loss, leg.factor)
        trained = self._operator._raysgd.trained_parameters()
        parameters = (parameter for each in optimizers for parameter in self._precision.parameters(each))
        silence = _silenced(trained) if isinstance(own, float) and not own else _NOTHING
        with silence, leg.weighing(factor), sync.backward_pass(parameters, is_second):
            run(loss)
        if items is None or (weight is None and items.known is None):
            return
        total = items.total()
        if not isinstance(total, torch.Tensor):
            leg.learn_items(total / sync.num_ranks, items.typical)
        if weight is not None and total == 0.0:
            self._skip_empty(optimizers)

    def _check_waiting(self, optimizer: Any) -> None:
        """Check that a loss can add to the gradients that an optimizer's parameters already have.

        The library cannot notice the steps of an optimizer that is not registered or does not support hooks.

        Raises:
            ValueError: These gradients were cleared, or the optimizer may already have stepped with them.
        """
        leg = self._sync.leg
        is_watched = tells_of_steps(optimizer) and any(each is optimizer for each in self._optimizers)
        if not (leg.rules.has_several or is_watched):
            raise ValueError(
                f"`self.backward` was called again for a batch, and it is unknown whether `{type(optimizer).__name__}` "
                "has stepped, which is not registered or no `torch.optim.Optimizer`: call `self.optimizer_step()` to "
                "step it, or add the losses up and call `self.backward` once."
            )
        if leg.rules.has_several and self._sync.are_cleared(self._precision.parameters(optimizer)):
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
        added = self._sync.leg.accumulation
        if added is not None and added.seen not in (None, _versions(self._precision.parameters(optimizer))):
            raise ValueError(
                f"`{self._sync.leg.rules.option}`: gradients were changed after `self.backward`, where they are "
                "not the means over the samples of the step yet. Change them in your own `optimizer_step`, before "
                "`super().optimizer_step()`, or pass `clip_grad_norm` or `clip_grad_value` to the trainer."
            )

    # ------------------------------------------------------------------------------------ steps

    def complete(self, optimizer: Any) -> None:
        """Make gradients, which are sums over the batches of a step, the mean over its samples or other items.

        A second call for the same step does nothing. If the total weight is 0, the optimizer must not step. However, if
        it is 0 because the loss ignores all labels, the gradients are 0, as in a single process.
        """
        sync, leg, added = self._sync, self._sync.leg, self._sync.leg.accumulation
        if added is None or added.is_complete:
            return
        self._check_unchanged(optimizer)
        added.complete()
        parameters = self._precision.parameters(optimizer)
        if not added.ends_step:
            sync.average(parameters)
        total, num_ranks = added.num_samples, sync.num_ranks
        if added.is_weighted:
            total = float(sync.start_total(added.own)())
            leg.learn_items(total / num_ranks / added.num_batches, added.typical / leg.rules.num_batches)
        if not total and not added.is_of_criterion:
            self._skip_empty([optimizer])
        if total and (correction := added.typical * num_ranks / total) != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)

    def skip(self, optimizer: Any) -> None:
        """Skip a batch in its step, as user code on a single worker wants."""
        leg = self._sync.leg
        leg.end_waiting()
        if leg.rules.has_several:
            leg.add_up(None, 1, is_skipped=True)
        elif optimizer is not None:
            self._skip_empty([optimizer])

    def _skip_empty(self, optimizers: Iterable[Any]) -> None:
        """Skip the optimizers' step, because all batches have weight 0. Warn once."""
        for each in optimizers:
            self._skip_step(each)
        if self._once.is_first("nothing counts"):
            logger.warning(
                "nothing counts in a step: all workers gave `weight=0`, or left their batches out. The optimizer does "
                "not step then. Later steps like this one are not reported"
            )

    def are_ready(self, given: Any) -> bool:
        """Return True if a step is due. Its gradients are then unscaled means over all samples of the step.

        Called before a user's `optimizer_step`. With gradient accumulation, a step is due in its last batch only.

        Args:
            given: First argument of the call to `optimizer_step`; None if it has no argument.
        """
        leg = self._sync.leg
        if leg.rules.has_several:
            leg.batch.ask_to_step()
        for optimizer in self.registered(given) if leg.plan.ends_step else ():
            self.complete(optimizer)
            self._precision.unscale(optimizer)
        return leg.plan.ends_step

    def apply(self, optimizer: Any = None, before: Callable[[Any], None] | None = None) -> None:
        """Step the optimizers if the current batch is the last batch of an optimizer step.

        Args:
            optimizer: Optimizer, or list of optimizers, to step. None if user code passed none.
            before: Function that gets each optimizer before it steps, with the averaged, unscaled gradients.
        """
        leg = self._sync.leg
        if leg.rules.has_several:
            leg.batch.ask_to_step()
        for each in self.chosen("optimizer_step", optimizer) if leg.plan.ends_step else ():
            if leg.rules.has_several:
                self.complete(each)
            if id(each) not in leg.batch.skipped:
                if before is not None:
                    self._precision.unscale(each)
                    before(each)
                self.step(each)
            leg.stepped(each)


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


def _versions(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(each.grad), getattr(each.grad, "_version", 0)) for each in parameters if each.grad is not None]


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
