"""`GradientSync`: averages the gradients of optimizer steps over the ranks. `Strategy` prepares the models for this.

The loss of a batch is the mean over its samples, and an all-reduce takes the unweighted mean of the ranks' gradients.
If the ranks' batches differ in size, that mean is not the mean over all samples. Therefore, each rank's gradient is
first multiplied by a factor that is proportional to the rank's number of samples, and is nearly always 1. With gradient
accumulation, this would be the sum of several batches' gradients. In this case, the library weights the losses instead.
This requires that the library, not user code, runs the backward pass. See `raysgd.torch.parallel.scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.arrays.batch_plan import BatchPlan
from raysgd.core.connections.torch import is_connection_error, mesh_group
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.record import FlightRecorder, StepRecord
from raysgd.torch.parallel.scale import Items, Scale
from raysgd.torch.parallel.tensors import multiply, reachable, repeat_first
from raysgd.trainer.worker.step_loop import StepRules

Pass = AbstractContextManager[Any]  # wraps a backward pass

_NOTHING = nullcontext()


class GradientSync:
    """Averages the gradients of an operator's steps over the ranks. This base class leaves gradients as they are.

    The base class is for a single worker, and for `strategy="none"`.

    Args:
        has_others: See the attribute.
        shares_metrics: See the attribute.

    Attributes:
        averages: True if gradients are averaged over the ranks, so that every optimizer step involves all ranks.
        has_others: True if there are other ranks, or if other ranks may join.
        shares_metrics: True if each rank sends its metrics to the other ranks in each step, along with the gradients.
        left_out: Models without trainable parameters, whose buffers are copied from rank 0 to the other ranks.
        defers: True if the gradients of all batches of a step are all-reduced together, in the last batch.
        waits: True if a step must wait for the sums of its gradients, as with NCCL (ADR 175).
        leg: Tracks the current batch and step in the part of a training call that this worker group runs. Between
            calls, it is a `Leg` without batches.
        is_lost: Function that returns True if an exception means that a connection to another rank was lost.
    """

    averages = False
    is_lost = staticmethod(is_connection_error)
    _defers = _defers_any = False  # whether gradients can wait for the last batch of a step; also those of user code

    def __init__(self, has_others: bool = True, shares_metrics: bool = False) -> None:
        self.has_others, self.shares_metrics = has_others, shares_metrics
        self.left_out: list[torch.nn.Module] = []
        self.models: Sequence[torch.nn.Module] = ()
        self.defers = self._checks_losses = False
        self.join_group(StepRecord())

    def join_group(self, record: StepRecord | None = None) -> None:
        """Forget the former worker group, because this process has joined another one.

        Args:
            record: What has happened since the last commit. Default: the same as in the former group.
        """
        self._set_leg(record=record or self.leg.record.in_next_group())

    def _set_leg(self, rules: StepRules | None = None, **options: Any) -> Leg:
        self.waits = self.averages and reachable() is not None
        self.leg = Leg(rules or StepRules(self.averages), **options)
        return self.leg

    def begin_leg(
        self,
        models: Sequence[torch.nn.Module],
        may_run_backward: bool,
        *,
        rules: StepRules | None = None,
        may_defer: bool = True,
        **options: Any,
    ) -> Leg:
        """Create the `Leg` for a call to `train`, or for the rest of a call that continues in a new worker group.

        Args:
            models: Wrapped models.
            may_run_backward: True if user code may run backward passes. User code may catch exceptions that a backward
                pass raises. Therefore, each step then checks whether its gradient communication succeeded.
            rules: What holds for all steps. Default: a step has one batch of each rank.
            may_defer: True if the gradients of all batches of a step may be all-reduced together, in the last batch.
            options: Further arguments of `Leg`.
        """
        self.models, rules = models, rules or StepRules(self.averages)
        self.defers = may_defer and rules.has_several and (self._defers_any if may_run_backward else self._defers)
        self._checks_losses = may_run_backward and self.has_others
        self._set_sync(True)
        if self.has_others or rules.num_shards:
            options["sync"] = self
        flight_recorder = FlightRecorder(self.leg.flight_recorder.number + self.averages)
        return self._set_leg(rules, record=self.leg.record, flight_recorder=flight_recorder, **options)

    def end_leg(self) -> None:
        """Replace `leg` with a `Leg` without batches, for user code that runs between two calls.

        Called at the end of each call, even if the call fails.
        """
        self._set_sync(True)
        self._set_leg(record=self.leg.record, flight_recorder=self.leg.flight_recorder, ledger=self.leg.ledger)

    def open(self, plan: BatchPlan) -> None:
        """Prepare a batch. In a step of several batches, let the all-reduce wait for the last batch, if possible."""
        if plan.starts_global_batch:
            for model in self.left_out:
                if model.training:
                    repeat_first(model.buffers())
        if self.defers:
            self._set_sync(plan.sync_gradients)

    def check(self) -> None:
        """Raise if the step that has ended is invalid, for example because a connection broke during the step."""
        if self._checks_losses:
            self.leg.record.check()

    def _set_sync(self, is_now: bool) -> None:
        """Average gradients in backward passes from now on, or in a later one."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return dist.get_world_size() if self.averages else 1

    def start_total(self, amount: Any) -> Callable[[], Any]:
        """Start to sum an amount, such as a number of labels, over the ranks whose gradients are averaged.

        Args:
            amount: This rank's amount: a number, or a one-element tensor on the device of the models.

        Returns:
            A function that waits for the sum and returns it. Call the function once. With NCCL, it returns a tensor,
            because reading the number would wait for the GPU.
        """
        if not self.averages:
            return lambda: amount
        group, device = mesh_group(), reachable()
        if device is None:  # without NCCL, numbers are summed in host memory, whether an amount is on a GPU or not
            amount = float(amount)
        numbers, record = torch.zeros(1, dtype=torch.float64, device=device) + amount, self.leg.record
        if group is not None:
            # Do not start a sum now, because the amount is usually sent together with the gradients. The returned
            # function sums the amounts if that has not happened.
            wait: Callable[[], Any] = partial(group.add_up, numbers.numpy())
        else:
            with record.noting_losses(self.is_lost):
                wait = self.start_sum(numbers)

        def total() -> Any:
            with record.noting_losses(self.is_lost):
                wait()
            return numbers.item() if numbers.device.type == "cpu" else numbers[0]

        return total

    def start_sum(self, numbers: torch.Tensor) -> Callable[[], Any]:
        """Start to sum a tensor in the process group that all-reduces gradients. Return a function to wait for it."""
        work: Any = dist.all_reduce(numbers, async_op=True)
        # With `NCCL_BLOCKING_WAIT`, `Work.wait` would make the host wait for the GPU. A future's `wait` does not.
        return work.wait if numbers.is_cpu else work.get_future().wait

    def multiply(self, gradients: torch.Tensor, may_send: bool = False) -> Items | None:
        """Multiply this rank's gradients by their weight, in place, before they are sent to the other ranks.

        Args:
            gradients: Gradients of the running backward pass.
            may_send: True if the caller can send items along with the gradients.

        Returns:
            The items to send along with the gradients; None if the other ranks need none. The caller must divide the
            sum of the ranks' gradients by their `divisor`.
        """
        self.leg.see_pass()
        _, weight, items = self.leg.scale
        sent = None if items is None or not may_send or items.is_known else items
        factor = weight if items is None else items.factor() if sent is None else sent.sent
        multiply(gradients, factor)
        return sent

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients whose all-reduce was deferred to a later batch, if no later batch has followed."""

    def are_cleared(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if no parameter has a gradient from earlier batches to which the current batch can add."""
        return all(parameter.grad is None for parameter in parameters)

    def backward_pass(self, scale: Scale, parameters: Iterable[torch.Tensor], is_second: bool) -> Pass:
        """Return a context manager for a backward pass by the library.

        Args:
            scale: How the pass is weighted.
            parameters: Parameters that get gradients.
            is_second: True if the batch already had a backward pass.
        """
        is_own = self.averages and (is_second or scale.items is not None)
        return self.leg.weighting(scale) if is_own else _NOTHING
