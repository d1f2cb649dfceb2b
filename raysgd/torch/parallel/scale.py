"""How a backward pass is weighted (`Scale`), so that a step's gradient is the mean over all samples or other items.

What a batch counts is the first of these that exists (`BatchItems.of_loss`):

1. the weight that user code passed to its backward pass, or returned from `forward`
2. the number of labels over which a PyTorch loss averages, or the sum of their weights
3. its number of samples

The first two are called items. Padding counts 0. A step's gradient is the mean over all batches and ranks:

    gradient = sum of (items * gradient) over all batches and ranks / sum of the items

An all-reduce takes the plain mean over the ranks. So the library weights losses and gradients as follows:

    a step has                  counts by  the loss is times            gradients are times, before they are sent
    one batch on a rank         samples    1                            num_samples * num_ranks / total
    one batch on a rank         items      1                            items / typical, or items * num_ranks / total
    a second backward pass      either     the number in column 4       1
    several batches on a rank   either     items / typical              1; before the step: typical * num_ranks / total
    logical shards              samples    num_samples / total          nothing is sent; rows are added in order

The second row depends on the way of the gradients. Over the mesh, the items travel with the gradients, and afterwards
the sum of gradients is divided by `total / typical`. Elsewhere, the hook waits for the total. Weighting gradients by
samples works even if user code runs the backward pass. In a step of several batches, a hook would see only the sum of
their gradients, so the library weights their losses, and user code must call `self.backward`.

ADR 3 explains why a gradient is weighted by its samples, its labels, or a weight that user code passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raysgd.core.arrays.batch_plan import BatchPlan
from raysgd.core.numbers.metric_meters import as_weight
from raysgd.torch.objects.criteria import NO_CALL, LossCall
from raysgd.trainer.worker.step_loop import StepRules


class Scale(NamedTuple):
    """How one backward pass is weighted: see the table above.

    Attributes:
        loss: Factor of the loss; None for 1.
        gradients: Factor of this rank's gradients before they are sent to the other ranks.
        items: Items of all ranks, from which the factor of the gradients follows; None if it is known.
    """

    loss: Any = None
    gradients: float = 1.0
    items: Items | None = None


UNSCALED = Scale()


def scale_of(plan: BatchPlan, rules: StepRules) -> Scale:
    """Return how the first backward pass of a batch is weighted by samples, even if user code runs it."""
    if rules.num_shards:
        return Scale((plan.num_samples or 0) / plan.total_samples if plan.total_samples else 0.0)
    return UNSCALED if rules.has_several or plan.weight == 1.0 else Scale(gradients=plan.weight)


class BatchItems:
    """Finds what each batch of a leg counts, the part of a training call that one worker group runs.

    Args:
        leg: The `Leg`, which tracks the current batch.
    """

    def __init__(self, leg: Any) -> None:
        self._leg = leg
        self._labels = NO_CALL  # the latest call to a criterion that averages over labels
        # True if a batch was weighted by samples although its loss ignores labels or weights them unequally. A tensor
        # if the value is on a GPU.
        self._uncounted: Any = False
        self._of_calls: list[Any] = []  # the numbers of labels in the loss of the latest such batch

    def note_labels(self, call: LossCall) -> None:
        """Record a call to a loss that averages over labels, so that the batch can be weighted by its labels."""
        if call.amount is None or not torch.is_grad_enabled():
            return
        batch, plan = self._leg.batch, self._leg.plan
        if not plan.is_padding:
            batch.items.append(call.amount)
        if self._leg.rules.weighs:
            self._labels = call._replace(output=None, target=None)  # do not keep the batch's large tensors in memory
            batch.uncounted = batch.uncounted | (not plan.is_padding and call.is_uneven)

    def of_loss(self, loss: torch.Tensor, given: Any) -> Any:
        """Return over how many items a loss is the mean, or None to weight it by the batch's number of samples.

        Args:
            loss: Loss of the batch. If it is the result of the latest recorded criterion call, labels are the weight.
            given: Weight from user code, or None.

        Raises:
            ValueError: The weight is invalid, does not work with `deterministic=True`, or is unknown because the loss
                ignores labels or weights them unequally.
        """
        labels = self._labels
        if given is None and labels.result is not loss:
            self.check_labels()
            return None
        weight = labels.amount if given is None else as_weight("weight", given)
        if not self._leg.rules.num_shards:
            self._leg.batch.uncounted = False
            return 0.0 if self._leg.plan.is_padding else weight if isinstance(weight, torch.Tensor) else float(weight)
        if given is None and labels.is_uneven is not True:  # labels on a GPU are checked when the call ends
            self.check_labels()
            return None
        by_labels = "a loss that ignores labels, or counts them by the weights of their classes,"
        what = by_labels if given is None else "`weight=` of `self.backward`, or from `forward`,"
        raise ValueError(
            f"{what} does not work with `deterministic=True`, where batches count by their samples: omit "
            "`deterministic=True`, or use a loss that is the mean over the samples."
        )

    def expect_weight(self) -> None:
        """Raise in the backward pass unless user code passes a weight, or the loss is the criterion's result."""
        self._leg.batch.uncounted = True

    def check_labels(self) -> None:
        """Raise if the batch's loss ignores labels or weights them unequally, and user code passed no weight.

        Labels on a GPU are checked when the call ends, because checking them here would wait for the GPU.
        """
        batch = self._leg.batch
        if batch.uncounted is not False and self._leg.rules.weighs:
            self._uncounted, batch.uncounted = self._uncounted | batch.uncounted, False
            self._of_calls = batch.items
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
        if len({*map(float, self._of_calls)}) > 1:
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
class Accumulation:
    """The losses whose gradients are added up for an optimizer step.

    Attributes:
        is_weighted: True if the batches count by items, False if they count by samples.
        typical: Typical sum of what one rank's batches count in a step, the same on all ranks. What each batch counts
            is divided by this number before it multiplies a loss. The sum of a step's losses thus has roughly the scale
            of a single batch's loss.
        own: Sum of what this rank's batches count.
        num_batches: Number of batches so far.
        last: Sequence number and weight of the latest batch.
        is_averaged: True if the latest batch ends the step. Its backward pass then averages the gradients over the
            ranks. False if their all-reduce may still be deferred.
        is_of_criterion: True if the items come from the criterion, False if they come from user code.
        is_complete: True if the summed gradients were made the step's mean.
        seen: Identities and versions of the gradients after the latest backward pass; None if they are not compared.
    """

    is_weighted: bool
    typical: float
    own: float = 0.0
    num_batches: int = 0
    last: tuple[int, float | None] | None = None
    is_averaged: bool = True
    is_of_criterion: bool = False
    is_complete: bool = False
    seen: list[tuple[int, int]] | None = None
    _done: float = 0.0
    _kept: float = 0.0  # samples of the latest global batch, as the next attribute
    _skipped: float = 0.0
    _has_kept: bool = False

    def see(self, versions: list[tuple[int, int]]) -> None:
        """Remember the identities and versions of the gradients, to find out whether user code changes them."""
        self.seen = versions

    def complete(self) -> None:
        """Record that the summed gradients are made the step's mean."""
        self.is_complete = True

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
    def num_samples(self) -> float:
        """Number of samples of all ranks' batches; 0 if user code skips all of them, or if items count."""
        return self._done + (self._kept or self._skipped) if self._has_kept else 0.0

    def correction(self, total: float, num_ranks: int) -> float:
        """Return the factor by which to multiply the summed gradients before the step.

        Args:
            total: What the batches of all ranks count. If it is 0, the factor is 0.
            num_ranks: Number of ranks.
        """
        return self.typical * num_ranks / total if total else 0.0


class Items:
    """Over how many items the loss of a batch is the mean, and the sum of the items of all ranks.

    Args:
        own: Items of this rank's batch, such as its number of labels; 0 for padding.
        typical: Typical number of items, the same on all ranks, by which items are divided. If all ranks have this
            number, all gradients are multiplied by exactly 1, so there is no rounding error.
        num_ranks: Number of ranks.
        wait: Function that waits for the sum of all ranks' items and returns the sum. Called if the items were not sent
            together with the gradients.

    Attributes:
        own: Items of this rank's batch.
        typical: See the argument.
        sent: Factor of gradients that are sent together with `own`.
    """

    def __init__(self, own: Any, typical: float, num_ranks: int, wait: Callable[[], Any]) -> None:
        self.own, self.sent = own, own / typical
        self.typical, self._num_ranks, self._wait = typical, num_ranks, wait
        self._total: Any = None

    @property
    def is_known(self) -> bool:
        """True if the items of all ranks are known."""
        return self._total is not None

    @property
    def total(self) -> Any:
        """Items of all ranks. Unless they are known, all ranks must read this together: it is a collective."""
        if self._total is None:
            self._total = self._wait()
        return self._total

    def learn(self, of_ranks: Sequence[float]) -> None:
        """Add up the items that the ranks sent along with their gradients."""
        self._total = sum(of_ranks)

    @property
    def divisor(self) -> Any:
        """Divisor of the sum of the ranks' gradients, each multiplied by its `sent`. 1 if no rank has items."""
        return self.total / self.typical or 1.0

    def factor(self) -> Any:
        """Return the factor by which to multiply this rank's gradients before they are averaged over the ranks.

        The factor is 0 if no rank has items.
        """
        share = self.own * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0
