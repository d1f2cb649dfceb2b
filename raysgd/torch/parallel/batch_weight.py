"""How much a batch counts in its optimizer step: its amount, and how the amounts of all batches weight their gradients.

The *amount* of a batch is the first of these that exists (`BatchWeights.weight_of`):

1. the weight that user code passed to its backward pass, or returned from `forward`
2. the number of labels over which a PyTorch loss averages, or the sum of their weights
3. its number of samples

Padding has the amount 0. A step's gradient is the mean over all batches and ranks, weighted by amount:

    gradient = sum of (amount * gradient) over all batches and ranks / sum of the amounts

If a step has one batch on each rank, a communication hook multiplies the gradients by the batch's weight before they
are sent to the other ranks: by its share of the samples (`Leg.outgoing`), or by its number of labels (`Counted`).
Weighting by samples works even if user code runs the backward pass. If a step has several batches (a *window*), a hook
would see only the sum of their gradients. In this case, the loss of each batch is multiplied by the batch's amount, and
the summed gradient is divided by the sum of all amounts before the step.

ADR 3 explains why a gradient is weighted by its samples, its labels, or a weight that user code passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raysgd.core.numbers.metric_meters import as_weight
from raysgd.torch.objects.criteria import NO_CALL, LossCall
from raysgd.torch.parallel.record import BatchRecord
from raysgd.trainer.worker.step_loop import BatchPlan


class BatchWeights:
    """Finds the weight of each batch in a leg, the part of a training call that one worker group runs.

    Args:
        matter: True if a step has several batches, on this rank or on several ranks.
        is_deterministic: True if gradients are added up by logical shards, which always count by their samples.
    """

    def __init__(self, matter: bool, is_deterministic: bool = False) -> None:
        self._matter, self._is_deterministic = matter, is_deterministic
        self._labels = NO_CALL  # the latest call to a criterion that averages over labels
        # True if a batch was weighted by samples although its loss ignores labels or weights them unequally. A tensor
        # if the value is on a GPU.
        self._uncounted: Any = False
        self._amounts: list[Any] = []  # the numbers of labels in the loss of the latest such batch

    def note_labels(self, batch: BatchRecord, plan: BatchPlan, call: LossCall) -> None:
        """Record a call to a loss that averages over labels, so that the batch can be weighted by its labels."""
        if call.amount is None or not torch.is_grad_enabled():
            return
        if not plan.is_padding:
            batch.amounts.append(call.amount)
        if self._matter:
            self._labels = call._replace(output=None, target=None)  # do not keep the batch's large tensors in memory
            batch.uncounted = batch.uncounted | (not plan.is_padding and call.is_uneven)

    def weight_of(self, batch: BatchRecord, plan: BatchPlan, loss: torch.Tensor, given: Any) -> Any:
        """Return the weight of a batch, or None to weight it by its number of samples.

        Args:
            batch: BatchRecord whose backward pass is about to run.
            plan: How the batch counts.
            loss: Loss of the batch. If it is the result of the latest recorded criterion call, labels are the weight.
            given: Weight from user code, or None.

        Raises:
            ValueError: The weight is invalid, does not work with `deterministic=True`, or is unknown because the loss
                ignores labels or weights them unequally.
        """
        labels = self._labels
        if given is None and labels.result is not loss:
            self.check_labels(batch)
            return None
        weight = labels.amount if given is None else as_weight("weight", given)
        if not self._is_deterministic:
            batch.uncounted = False
            return 0.0 if plan.is_padding else weight if isinstance(weight, torch.Tensor) else float(weight)
        if given is None and labels.is_uneven is not True:  # labels on a GPU are checked when the call ends
            self.check_labels(batch)
            return None
        by_labels = "a loss that ignores labels, or counts them by the weights of their classes,"
        what = by_labels if given is None else "`weight=` of `self.backward`, or from `forward`,"
        raise ValueError(
            f"{what} does not work with `deterministic=True`, where batches count by their samples: omit "
            "`deterministic=True`, or use a loss that is the mean over the samples."
        )

    def check_labels(self, batch: BatchRecord) -> None:
        """Raise if the batch's loss ignores labels or weights them unequally, and user code passed no weight.

        Labels on a GPU are checked when the call ends, because checking them here would wait for the GPU.
        """
        if batch.uncounted is not False and self._matter:
            self._uncounted, batch.uncounted = self._uncounted | batch.uncounted, False
            self._amounts = batch.amounts
            if not isinstance(self._uncounted, torch.Tensor):
                self.check_counted()

    def check_counted(self) -> None:
        """Check that no batch was weighted by its samples although its loss ignores labels or weights them unequally.

        Raises:
            ValueError: A batch was weighted by its samples, so the gradients differ from those of a single process.
        """
        uncounted, self._uncounted = self._uncounted, False
        if uncounted:
            raise ValueError(
                "some labels are ignored by the loss, or count more than others, and batches counted by their samples, "
                f"so gradients are not those of one process. {self._remedy()}"
            )

    def _remedy(self) -> str:
        """Return what to write if a loss ignores labels or weights them, and it is unknown how much a batch counts."""
        latest = self._labels
        if len({*map(float, self._amounts)}) > 1:
            return (
                "The loss has several means over different labels, so no single weight is right. Make it one mean: add "
                "up losses with `reduction='sum'`, divide them by one number, and return that number from `forward` "
                "after the loss, or pass it, as in `self.backward(loss, weight=number)`."
            )
        if latest.result is None:
            return (
                "The loss has its own `forward` or is decorated, so say what it is the mean over: return that number "
                "from `forward` after the loss, or pass it, as in `self.backward(loss, weight=number)`."
            )
        is_counted = f"target != {latest.ignored}"
        number, hint = f"({is_counted}).sum()", ""
        if latest.num_labels is None:
            number, hint = f"class_weights[target[{is_counted}]].sum()", ", with the class weights of the loss"
        return (
            f"Say how much a batch counts{hint}: pass it, as in `self.backward(loss, weight={number})`, or return it "
            "from `forward` after the loss."
        )


@dataclass
class Window:
    """The batches whose gradients are accumulated for an optimizer step, with their amounts.

    Attributes:
        is_weighted: True if the amounts are weights or numbers of labels, False if they are numbers of samples.
        reference: Typical sum of the amounts of one rank's batches in a step, the same on all ranks. Each amount is
            divided by this number before it multiplies a loss. The sum of a step's losses thus has roughly the scale of
            a single batch's loss.
        own: Sum of the amounts of this rank's batches so far.
        num_batches: Number of batches so far.
        last: Sequence number and weight of the latest batch.
        is_exchanged: True if the latest batch ends the step. Its backward pass then averages the gradients over the
            ranks. False if their all-reduce may still be deferred.
        is_of_criterion: True if the amounts come from the criterion, False if they come from user code.
        is_complete: True if the summed gradients were made the step's mean.
        seen: Identities and versions of the gradients after the latest backward pass; None if they are not compared.
    """

    is_weighted: bool
    reference: float
    own: float = 0.0
    num_batches: int = 0
    last: tuple[int, float | None] | None = None
    is_exchanged: bool = True
    is_of_criterion: bool = False
    is_complete: bool = False
    seen: list[tuple[int, int]] | None = None
    _done: float = 0.0
    _kept: float = 0.0  # samples of the latest global batch, as the next attribute
    _skipped: float = 0.0
    _has_kept: bool = False

    def add_samples(self, number: float, is_skipped: bool, ends_global_batch: bool) -> None:
        """Count the samples of a batch of all ranks.

        Samples that user code skips do not count. But a global batch of which it skips all samples counts as a gradient
        of 0, as with Lightning.
        """
        self._has_kept |= not is_skipped
        if is_skipped:
            self._skipped += number
        else:
            self._kept += number
        if ends_global_batch:
            self._done += self._kept or self._skipped
            self._kept = self._skipped = 0.0

    @property
    def total(self) -> float:
        """Number of samples of all ranks' batches; 0 if user code skips all of them, or if the amounts are others."""
        return self._done + (self._kept or self._skipped) if self._has_kept else 0.0

    def correction(self, seen: float, num_ranks: int) -> float:
        """Return the factor by which to multiply the summed gradients before the step.

        Args:
            seen: Sum of the amounts of all ranks' batches. If it is 0, the factor is 0.
            num_ranks: Number of ranks.
        """
        return self.reference * num_ranks / seen if seen else 0.0


class Counted:
    """The amount of a batch that is not weighted by its number of samples, and the sum of all ranks' amounts.

    Args:
        amount: Amount of this rank's batch, such as its number of labels; 0 for padding.
        reference: Typical amount, the same on all ranks, by which amounts are divided. If all amounts equal the
            reference, all gradients are multiplied by exactly 1, so there is no rounding error.
        num_ranks: Number of ranks.
        wait: Function that waits for the sum of all ranks' amounts and returns the sum. Called if the amounts were not
            sent together with the gradients.

    Attributes:
        amount: Amount of this rank's batch.
        reference: Typical amount, by which amounts are divided.
    """

    def __init__(self, amount: Any, reference: float, num_ranks: int, wait: Callable[[], Any]) -> None:
        self.amount, self.reference, self._num_ranks, self._wait = amount, reference, num_ranks, wait
        self._total: Any = None

    @property
    def is_known(self) -> bool:
        """True if the sum of all ranks' amounts is known."""
        return self._total is not None

    @property
    def total(self) -> Any:
        """Sum of all ranks' amounts.

        Unless the sum is known, reading it is a collective operation, in which all ranks must take part.
        """
        if self._total is None:
            self._total = self._wait()
        return self._total

    def learn(self, of_ranks: Sequence[float]) -> None:
        """Add up the amounts that the ranks sent along with their gradients."""
        self._total = sum(of_ranks)

    @property
    def divisor(self) -> Any:
        """Divisor of the sum of the ranks' gradients, each multiplied by its `amount / reference`. 1 if all are 0."""
        return self.total / self.reference or 1.0

    def factor(self) -> Any:
        """Return the factor by which to multiply this rank's gradients before they are averaged over the ranks.

        The factor is 0 if the sum of all ranks' amounts is 0.
        """
        share = self.amount * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0
