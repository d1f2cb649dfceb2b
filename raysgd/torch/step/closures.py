"""Closures of optimizers: each call returns one loss to all ranks, so that all optimizers decide alike.

An optimizer such as `LBFGS` calls its closure as often as losses and gradients make it. Gradients are averages over the
ranks. If each rank went by its own loss, some would call the closure once more than others, and their gradients would
be averaged with those of another step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.torch.parallel.strategy import NoParallel


class Closures:
    """Calls closures together with the other ranks.

    Args:
        parallel: How the replicas are kept equal.
        sum_over_workers: Returns the sums of all workers' numbers.
    """

    def __init__(self, parallel: NoParallel, sum_over_workers: Callable[..., list[float]]) -> None:
        self._parallel = parallel
        self._sum_over_workers = sum_over_workers

    def check(self) -> None:
        """Refuse a step with a closure where the gradients of several batches add up.

        Raises:
            ValueError: They do.
        """
        step = self._parallel.step
        if step.window > 1 or step.shards is not None:
            raise ValueError(
                "An optimizer was given a closure, which computes the gradients of a whole step, and here a step has "
                "several batches. Omit `accumulate_grad_batches`, `max_batch_per_worker` or `deterministic=True`, or "
                "go through all batches of a step in the closure."
            )

    def call(self, closure: Callable[[], Any]) -> Any:
        """Return the loss of a closure as the mean over all ranks, weighted as the gradients are.

        Raises:
            TypeError: Several ranks step together, and the closure returned something other than a loss.
        """
        step = self._parallel.step
        num_weights = len(step.weights)
        loss = closure()
        if loss is None or not step.is_joint:
            return loss
        amount = step.weights[-1] if len(step.weights) > num_weights else step.weight
        self._parallel.record.note("a closure returned its loss")
        with self._parallel.exchanges.noting():
            total, amounts = self._sum_over_workers(amount * _number(loss) if amount else 0.0, amount)
        return _replaced(loss, total / amounts if amounts else 0.0)


def _number(loss: Any) -> float:
    try:
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"The closure of an optimizer returned a `{type(loss).__name__}`: return the loss, a number or a tensor of "
            "one element, which is averaged over the workers, or None."
        ) from error


def _replaced(loss: Any, value: float) -> Any:
    """Return a loss with another value, and with the graph that it had."""
    if not isinstance(loss, torch.Tensor):
        return value
    copied = loss.clone()
    copied.detach().fill_(value)
    return copied
