"""`OptimizerHooks`: hooks that clip gradients before each step of an optimizer and notify callbacks and listeners.

PyTorch calls the hooks even if user code calls `optimizer.step()` itself (ADR 23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks


class OptimizerHooks:
    """Passes an optimizer's gradients to callbacks and clips them before each step, even if user code calls `step`.

    Args:
        precision: Numeric precision of the training. It scales and unscales gradients.
        options: Options for clipping.
        bounds: The operator, whose `clip_grad_norm` and `clip_grad_value` clip the gradients.
        parallel: Strategy of the worker, whose `leg` tracks the current batch.
        callbacks: The worker's callbacks.

    Attributes:
        clips: True if gradients are clipped.
        may_miss_clipping: True if gradients must be clipped, but an optimizer does not support hooks, so that user code
            may step it without clipping.
    """

    def __init__(
        self,
        precision: Precision,
        options: StepOptions,
        bounds: Any,
        parallel: Strategy,
        callbacks: InstalledCallbacks,
    ) -> None:
        self._callbacks = callbacks
        self._precision = precision
        self._options, self.clips = options, options.clips
        self._bounds = bounds
        self._parallel = parallel
        self._steps_itself = False
        self._optimizers: Sequence[Any] = ()
        self.may_miss_clipping = False
        self._undo: list[Callable[[], None]] = []
        self._about_to_step: set[int] = set()  # IDs of the optimizers whose current step has gradients

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Install hooks on the optimizers' steps, so that gradients are clipped even if user code calls `step`.

        Hooks and listeners from before this call are removed.
        """
        for undo in self._undo:
            undo()
        self._optimizers = optimizers
        hooked = list(filter(tells_of_steps, optimizers))
        self.may_miss_clipping = self.clips and len(hooked) < len(optimizers)
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

    def sees(self, optimizer: Any) -> bool:
        """Return True if `optimizer` has the hooks, so that every one of its steps is noticed."""
        return tells_of_steps(optimizer) and any(each is optimizer for each in self._optimizers)

    def step(self, optimizer: Any) -> None:
        """Step an optimizer. If options or callbacks require it, first unscale, report and clip the gradients."""
        if self.clips or self._callbacks.wants_gradients:
            self._precision.unscale(optimizer)
            self._clip(optimizer)
        self._steps_itself = True
        try:
            self._precision.step(optimizer)
        finally:
            self._steps_itself = False

    def _clip(self, optimizer: Any) -> None:
        if self._callbacks.wants_gradients:
            self._callbacks.gradients(optimizer)
        if not self.clips:
            return
        options, self._parallel.leg.has_clipped = self._options, True
        parameters = [each for each in self._precision.parameters(optimizer) if each.grad is not None]
        if options.clip_grad_norm is not None:
            norm = self._bounds.clip_grad_norm(parameters, options.clip_grad_norm)
            self._callbacks.note_norm(norm)
        if options.clip_grad_value is not None:
            self._bounds.clip_grad_value(parameters, options.clip_grad_value)

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
            if not self._steps_itself or self._callbacks.wants_steps or self._precision.is_mixed:
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
        if not self._steps_itself and leg.rules.has_several and leg.adds_to(optimizer):
            raise ValueError(
                f"`{leg.rules.option}`: your code calls `step` of `{type(optimizer).__name__}`, and its gradients "
                "wait for more batches: call `self.optimizer_step()` for every batch instead."
            )
        self._about_to_step.add(id(optimizer))
        if not self._steps_itself:
            leg.items.check_labels()
            if self._parallel.synchronizes:
                leg.record.wait()
        self._precision.check_use()
        if not self._steps_itself and (self.clips or self._callbacks.wants_gradients):
            _unscale_for_step(optimizer)
            self._clip(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Record an optimizer's step and notify callbacks. PyTorch calls this hook after each step."""
        if not self._steps_itself:  # for steps by the library, `Gradients.apply` calls `leg.stepped`
            self._parallel.leg.stepped(optimizer)
        if not self._callbacks.wants_steps or id(optimizer) not in self._about_to_step:
            return
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the update if this is not 0
        if overflow is None or not overflow.item():
            self._callbacks.stepped(optimizer)


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
