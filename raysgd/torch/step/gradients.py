"""The gradients of an operator: computed, weighted, completed over batches and workers, and applied."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from raysgd._numbers.weights import BATCH_WEIGHT, as_weight
from raysgd._text.once import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.batch_weights import BatchWeights
from raysgd.torch.step.own_steps import OwnSteps

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


class Gradients:
    """Makes of the losses of batches what one loss over all their samples would have given."""

    def __init__(
        self, precision: Precision, parallel: NoParallel, weights: BatchWeights, own_steps: OwnSteps, once: Once
    ) -> None:
        self._precision = precision
        self._parallel = parallel
        self._weights = weights
        self._own_steps = own_steps
        self._once = once

    def compute(
        self,
        loss: torch.Tensor,
        chosen: list[Any],
        bystanders: list[Any],
        weight: Any,
        trained: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """Clears the gradients, unless there are some to add to, and computes those of a loss.

        Args:
            loss: The mean over what the batch counts by.
            chosen: The optimizers that the loss is for.
            bystanders: Others whose gradients it is to be the only source of.
            weight: How much the batch counts, as user code says; None if it does not.
            trained: All parameters that are trained.
        """
        step, cleared = self._parallel.step, [*chosen, *bystanders]
        if step.shards is not None:
            self._compute_shard(loss, cleared, weight, list(trained()))
            return
        own = self._weights.of_loss(weight) if weight is not None or self._weights.are_of_labels else None
        self._clear(chosen, bystanders)
        is_further = step.note_backward(cleared if step.window == 1 else chosen, own)
        further_pass = self._parallel.further_pass(self._parameters(cleared)) if is_further else _NOTHING
        with further_pass, self._own_steps.sparing(chosen) if step.window > 1 else _NOTHING:
            if own is None:
                self._precision.backward(self._parallel.weighted(loss, chosen[0], is_further), chosen[0])
            else:
                counting = 0.0 if step.is_padding else own
                with self._parallel.weighting(loss, chosen, counting, trained()) as weighted:
                    self._precision.backward(weighted, chosen[0])
        if own is not None and step.window == 1:
            self._complete_all(cleared)

    def _parameters(self, optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
        return (parameter for each in optimizers for parameter in self._precision.parameters(each))

    def _clear(self, chosen: Sequence[Any], bystanders: Sequence[Any]) -> None:
        """Clears the gradients that this batch does not add to.

        Raises:
            ValueError: Gradients that it is to add to are gone, or it is unknown whether they were used.
        """
        step, stale = self._parallel.step, []
        for each in chosen:
            if step.waiting(each) is None:
                stale.append(each)
            else:
                self._check_waiting(each)
        for each in [*stale, *(bystanders if chosen[0] in stale else ())]:
            each.zero_grad()

    def _check_waiting(self, optimizer: Any) -> None:
        """Check gradients that a loss is to be added to."""
        step = self._parallel.step
        if step.window == 1 and not self._own_steps.sees(optimizer):
            raise ValueError(
                f"`self.backward` was called again for a batch, and it is unknown whether `{type(optimizer).__name__}` "
                "has stepped, which is not registered or no `torch.optim.Optimizer`: call `self.optimizer_step()` to "
                "step it, or add the losses up and call `self.backward` once."
            )
        if step.window > 1 and self._parallel.are_cleared(self._precision.parameters(optimizer)):
            raise ValueError(
                f"`{step.option}`: the gradients of earlier batches of this step are gone. `self.backward` clears "
                "gradients where a step begins: remove `zero_grad()` from `train_batch`. To leave a batch out, "
                "multiply its loss by 0."
            )

    def _compute_shard(
        self, loss: torch.Tensor, optimizers: list[Any], weight: Any, trained: list[torch.Tensor]
    ) -> None:
        """Computes the gradients of a logical shard, and after the last one those of the joint batch."""
        step = self._parallel.step
        assert step.shards is not None
        if weight is not None:
            raise ValueError(
                "`self.backward(loss, weight=...)` does not work with `deterministic=True`: shards count by their "
                "samples there. Omit one of the two."
            )
        step.end_forward()
        step.use()
        for each in optimizers:
            each.zero_grad()
        self._precision.backward(loss * step.fraction, optimizers[0])
        parameters = [each for each in trained if each.requires_grad]
        if not step.is_padding:
            step.shards.keep(parameters)
        if step.is_boundary:
            self._parallel.note_exchange("gradients were exchanged")
            with self._parallel.exchanges.noting():
                self._parallel.rows.exchange()
                step.shards.add_up(parameters, step.seed_of_step)
            self._parallel.exchanges.count(True)

    def _complete_all(self, optimizers: Sequence[Any]) -> None:
        """Does at the end of a backward pass what there is to do for a step of one batch."""
        for optimizer in optimizers:
            self.complete(optimizer)
        for optimizer in optimizers:
            self._parallel.step.settle(optimizer)

    def complete(self, optimizer: Any) -> None:
        """Makes of the gradients of several batches what one batch of all their samples would have given.

        Where nothing in them counts, they are cleared, so that a step of the optimizer changes nothing. Where that is
        because of the criterion, they are 0, as in one process.
        """
        step, parameters = self._parallel.step, self._precision.parameters(optimizer)
        if step.is_unexchanged(optimizer):
            self._parallel.exchange(parameters)
        correction = step.correction(optimizer)
        if correction == 0.0 and self._weights.are_of_criterion:
            return
        if correction == 0.0:
            step.leave_out(optimizer)
            self._warn_of_nothing()
        for parameter in parameters:
            if correction == 0.0:
                parameter.grad = None
            elif correction != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(correction)

    def _warn_of_nothing(self) -> None:
        if self._once.is_first("nothing counts"):
            logger.warning(
                "nothing counts in a step: all workers gave `weight=0`. The optimizer does not step then. Later steps "
                "like this one are not reported"
            )

    def apply(self, optimizers: Iterable[Any]) -> None:
        """Steps optimizers, if all their gradients are there."""
        step = self._parallel.step
        for optimizer in optimizers:
            if step.window > 1:
                step.end_batch(optimizer)
            if not step.is_boundary:
                continue
            if step.window > 1:
                self.complete(optimizer)
            if id(optimizer) not in step.left_out:
                self._own_steps.step(optimizer)
            step.stepped(optimizer)

    def compare_weight(self, metrics: Mapping[str, Any], name: str) -> None:
        """Warns once where metrics are averaged by a weight, and gradients are not."""
        weight, given = as_weight(BATCH_WEIGHT, metrics[BATCH_WEIGHT]), self._parallel.step.weights
        if not any(math.isclose(weight, each, rel_tol=1e-6) for each in given) and self._once.is_first("weight"):
            logger.warning(
                "`%s.train_batch` returned `batch_weight` %s, and no backward pass of the batch had that weight. It "
                "averages metrics, not gradients: to average these too, call `self.backward(loss, weight=...)` with it",
                name,
                weight,
            )


def backward_with(operator: Any, loss: torch.Tensor, weight: Any) -> None:
    """Calls the method, maybe the user's, with the weight that `forward` returned.

    Raises:
        TypeError: The method does not take one.
    """
    if not _takes(operator.backward, "weight"):
        raise TypeError(
            f"`{type(operator).__name__}.forward` returned a weight, but its `backward` does not take one: write "
            "`def backward(self, loss, **options)` and pass the options on to `super().backward(loss, **options)`."
        )
    operator.backward(loss, weight=weight)


def step_with(operator: Any, optimizer: Any) -> None:
    """Calls the method, maybe the user's, that steps `optimizer`."""
    arguments = (optimizer,) if _takes(operator.optimizer_step, "optimizer") else ()
    operator.optimizer_step(*arguments)


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
