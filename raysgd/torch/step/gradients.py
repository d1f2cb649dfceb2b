"""Computes an operator's gradients, weights them, averages them over batches and workers, and steps the optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from raysgd.core.text.log_lines import Once
from raysgd.torch.parallel.scale import Items, Scale
from raysgd.torch.step.steps import OptimizerSteps

logger = logging.getLogger(__name__)
Run = Callable[[torch.Tensor], None]  # runs the backward pass of a loss

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


class Gradients(OptimizerSteps):
    """Computes the gradients of optimizer steps, and steps the optimizers.

    A step's gradient equals the gradient of one large batch with all samples of the step. These are the samples of all
    accumulated batches on all ranks.

    Args:
        *parts: See `OptimizerSteps`.
        once: Remembers which warnings were logged.
    """

    def __init__(self, *parts: Any, once: Once) -> None:
        super().__init__(*parts)
        self._once = once

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
        """
        sync, leg, is_given = self._sync, self._sync.leg, weight is not None
        chosen = self.chosen("backward", optimizer) if clears else [] if optimizer is None else [optimizer]
        cleared = chosen
        if clears and optimizer is None and len(self._optimizers) > 1:
            cleared = [*chosen, *(each for each in self._optimizers if each is not chosen[0])]
        if self._callbacks.may_leave_out:
            loss = self._callbacks.see_loss(loss)
        scale_again = self._precision.scale_again
        unscaled = [each for each in cleared if scale_again(each)] if self._precision.is_mixed else []
        # Without other batches in the step, on this rank or on others, the weight of the batch does not matter.
        is_weighted = is_given or leg.rules.weighs
        own = leg.items.of_loss(loss, weight) if is_weighted else None
        if clears:
            self._clear(chosen, cleared)
        had_one = leg.note_backward(cleared, by_samples=own is None)
        if is_weighted or sync.has_others:
            leg.ledger.end_own_work()
        run = run or partial(self._precision.backward, optimizer=cleared[0])
        if is_weighted:
            is_second = had_one and clears and leg.rules.averages and not leg.rules.num_shards
            self._run_weighted(loss, run, cleared, own, is_given, is_second)
        else:
            run(loss)
        if clears and leg.accumulation is not None:
            leg.accumulation.see(self._versions(cleared[0]))
        if sync.waits and leg.plan.sync_gradients:
            leg.record.wait()
        for each in unscaled:  # a user's `optimizer_step` computes these gradients
            self._precision.unscale(each)

    def _run_weighted(
        self, loss: torch.Tensor, run: Run, cleared: list[Any], own: Any, is_given: bool, is_second: bool
    ) -> None:
        """Run a backward pass whose weight matters, as the table in `raysgd.torch.parallel.scale` says.

        Args:
            loss: Loss of the batch.
            run: Function that runs the backward pass of the weighted loss.
            cleared: Optimizers whose gradients were cleared for this backward pass, or to which the pass adds. The loss
                trains the first one.
            own: Items of the batch; None to weight it by its number of samples.
            is_given: True if the items come from user code.
            is_second: True if `DistributedDataParallel` may not average the gradients, because it already has averaged
                those of this batch.
        """
        sync, leg, items = self._sync, self._sync.leg, None
        if leg.rules.has_several:
            scale = Scale(leg.add_up(own, sync.num_ranks, is_of_criterion=not is_given))
        elif own is None:
            scale = Scale(leg.plan.weight) if is_second else leg.scale
        else:
            items = Items(own, leg.usual_items(sync.num_ranks), sync.num_ranks, sync.start_total(own))
            scale = Scale(items.factor()) if is_second else Scale(items=items)
        parameters = (parameter for each in cleared for parameter in self._precision.parameters(each))
        is_silent = isinstance(own, float) and not own
        silence = _silenced(self._operator._raysgd.trained_parameters()) if is_silent else _NOTHING
        with silence, sync.backward_pass(scale, parameters, is_second):
            run(loss if scale.loss is None else loss * scale.loss)
        if items is not None:
            total = items.total if is_given or items.is_known else None
            if is_given and total == 0.0:  # user code passed weight 0 on all ranks
                self._leave_out(cleared)
            elif not isinstance(total, torch.Tensor) and total:
                leg.learn_items(total / sync.num_ranks, items.typical)

    def _clear(self, chosen: Sequence[Any], cleared: Sequence[Any]) -> None:
        """Clear the gradients of optimizers, except gradients to which this batch adds.

        Args:
            chosen: Optimizers that the loss trains.
            cleared: The same optimizers, then others whose gradients are cleared if those of the first one are.

        Raises:
            ValueError: Gradients to which the batch must add were cleared, or an optimizer may already have stepped
                with these gradients.
        """
        leg, stale = self._sync.leg, []
        for each in chosen:
            if leg.adds_to(each):
                self._check_waiting(each)
            else:
                stale.append(each)
        for each in [*stale, *(cleared[len(chosen) :] if chosen[0] in stale else ())]:
            each.zero_grad()

    def _check_waiting(self, optimizer: Any) -> None:
        """Check that a loss can add to the gradients that an optimizer's parameters already have.

        The library cannot notice the steps of an optimizer that is not registered or does not support hooks.

        Raises:
            ValueError: These gradients were cleared, or the optimizer may already have stepped with them.
        """
        leg = self._sync.leg
        if not leg.rules.has_several and not self._sees(optimizer):
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
        if added is not None and added.seen not in (None, self._versions(optimizer)):
            raise ValueError(
                f"`{self._sync.leg.rules.option}`: gradients were changed after `self.backward`, where they are "
                "not the means over the samples of the step yet. Change them in your own `optimizer_step`, before "
                "`super().optimizer_step()`, or pass `clip_grad_norm` or `clip_grad_value` to the trainer."
            )

    def _versions(self, optimizer: Any) -> list[tuple[int, int]]:
        gradients = [each.grad for each in self._precision.parameters(optimizer) if each.grad is not None]
        return [(id(each), getattr(each, "_version", 0)) for each in gradients]

    # ------------------------------------------------------------------------------------ steps

    def _complete(self, optimizer: Any) -> None:
        """Average the accumulated gradients over all batches of a step.

        If the total weight of the batches is 0, clear the gradients, so that the optimizer does not step. However, if
        the weight is 0 because the loss ignores all labels, keep gradients of 0, as in a single process.

        A second call for the same step does nothing.
        """
        leg, num_ranks = self._sync.leg, self._sync.num_ranks
        added = leg.accumulation
        if added is None or added.is_complete:
            return
        self._check_unchanged(optimizer)
        parameters = self._precision.parameters(optimizer)
        added.complete()
        if not added.is_averaged:
            self._sync.average(parameters)
        total = added.num_samples
        if added.is_weighted:
            total = float(self._sync.start_total(added.own)())
            leg.learn_items(total / num_ranks / added.num_batches, added.typical / leg.rules.num_batches)
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
        leg = self._sync.leg
        leg.end_waiting()
        if leg.rules.has_several:
            leg.add_up(None, 1, is_skipped=True)
        elif optimizer is not None:
            self._leave_out([optimizer])

    def _leave_out(self, optimizers: Iterable[Any]) -> None:
        """Clear the optimizers' gradients and skip their step, because all batches have weight 0. Warn once."""
        for each in optimizers:
            self._clear_for_skip(each)
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
        for optimizer in self.registered(given) if leg.plan.sync_gradients else ():
            self._complete(optimizer)
            self._precision.unscale(optimizer)
        return leg.plan.sync_gradients

    def apply(self, optimizer: Any = None, before: Callable[[Any], None] | None = None) -> None:
        """Step the optimizers if the current batch is the last batch of an optimizer step.

        Args:
            optimizer: Optimizer, or list of optimizers, to step. None if user code passed none.
            before: Function that gets each optimizer before it steps, with the averaged, unscaled gradients.
        """
        leg = self._sync.leg
        if leg.rules.has_several:
            leg.batch.ask_to_step()
        for each in self.chosen("optimizer_step", optimizer) if leg.plan.sync_gradients else ():
            if leg.rules.has_several:
                self._complete(each)
            if id(each) not in leg.batch.skipped:
                if before is not None:
                    self._precision.unscale(each)
                    before(each)
                self.step(each)
            leg.stepped(each)
