"""The weights that batches have because of their criterion: a mean over labels counts by these, not by samples.

A loss of PyTorch leaves out the labels that it ignores, and counts others by the weights of their classes. What is
left is known only once a batch is there, and ranks exchange weights in all steps or in none. So they agree ahead. Where
the criterion was told so, batches count by labels. Elsewhere there may be labels that PyTorch ignores by itself, so
batches count by labels in the first pass over the data, and later if some were ignored before. Why: ADR 44.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd._numbers.meters import NUM_SAMPLES
from raysgd._numbers.weights import BATCH_WEIGHT, as_weight, weight_of
from raysgd._text.once import Once
from raysgd.torch.objects.criteria import CountedLabels, LossCall, are_classes, means_over_labels
from raysgd.torch.parallel.strategy import NoParallel

logger = logging.getLogger(__name__)


class BatchWeights:
    """Knows by how much the batches of an operator count.

    Args:
        parallel: How the replicas are kept equal.
        once: What was said already.

    Attributes:
        are_needed: Whether steps of the running call have several batches, so that it matters how much each counts.
        are_of_labels: Whether losses count by labels, without a word from user code.
        are_of_criterion: Whether the last loss did so.
    """

    def __init__(self, parallel: NoParallel, once: Once) -> None:
        self._parallel, self._once = parallel, once
        self._criterion: Any = None
        self._first_epoch: int | None = None
        self._is_first = self._is_told = self._may_count = self._was_given = False
        self._is_used = False  # what was noted, by a backward pass
        self.are_needed = self.are_of_labels = self.are_of_criterion = False
        self._differ: Any = False  # whether labels count otherwise than samples; maybe a tensor that was not read
        self._num_each: set[float] = set()  # how many labels a sample has

    def begin_call(self, criterion: Any, epoch_idx: int) -> None:
        """Begin a call of `train`, whose first batch belongs to this pass."""
        self._criterion, means = criterion, means_over_labels(criterion)
        self._first_epoch = epoch_idx if self._first_epoch is None else self._first_epoch
        self._is_first = epoch_idx == self._first_epoch
        self._is_told = any(labels.are_chosen for labels in means)
        step = self._parallel.step
        self.are_needed = step.window > 1 or self._parallel.synchronizes or step.shards is not None
        self._may_count = bool(means) and self.are_needed and self._obstacle is None
        self._count_by_labels(self._may_count and self._is_told)
        self._was_given = False

    def _count_by_labels(self, by_labels: bool) -> None:
        self.are_of_labels, self.are_of_criterion = by_labels, False

    @property
    def _obstacle(self) -> str | None:
        """The option of the trainer that rules weights out."""
        return "deterministic=True" if self._parallel.step.shards is not None else self._parallel.weights_obstacle

    def votes(self) -> list[bool]:
        """Return whether this rank wants the next batches to count by labels; nothing where all ranks know it."""
        if not self._may_count or self._is_told:
            return []
        return [self._is_first or bool(self._differ) or len(self._num_each) > 1]

    def agree(self, votes: Sequence[float]) -> None:
        """Let the next batches count by labels if any rank wants it: these are the sums of all ranks' votes."""
        if votes:
            self._count_by_labels(votes[0] > 0)

    def note(self, comparison: LossCall) -> None:
        """Take notice of what the criterion compares."""
        step = self._parallel.step
        if step.is_padding or not torch.is_grad_enabled():
            return
        if self._is_used:
            step.amounts, self._is_used = [], False
        step.has_compared = True
        labels = comparison.labels
        if labels is None:
            return
        amount = comparison.amount
        if amount is not None:
            step.amounts.append(amount)
        self._compare(labels, comparison.target, amount)
        if step.samples:
            self._num_each.add(comparison.target.numel() / step.samples)

    def look_at(self, target: Any) -> None:
        """Look for signs that a batch does not count by its samples, whose loss is none of PyTorch's."""
        step = self._parallel.step
        if not step.has_compared and not step.is_padding and are_classes(target):
            self._compare(CountedLabels.of(self._criterion), target)

    def _compare(self, labels: CountedLabels, target: torch.Tensor, amount: Any = None) -> None:
        """Compare what counts with the number of all labels."""
        if labels.class_weights is not None:
            self._differ = True
        elif self._differ is not True:
            amount = labels.amount(target) if amount is None else amount
            self._differ = self._differ | (amount != target.numel())

    def of_loss(self, given: Any) -> float | None:
        """Return by how much the loss of a batch counts; None for its samples.

        Args:
            given: What user code says.
        """
        self.are_of_criterion = given is None and self.are_of_labels
        if given is None:
            return self._amount_of_loss() if self.are_of_labels else None
        self._was_given = True
        return as_weight("weight", given)

    def _amount_of_loss(self) -> float:
        """All losses have one if batches count by labels, because all ranks wait for it."""
        step, self._is_used = self._parallel.step, True
        amount = mean_amount(step.amounts)
        self._was_given = self._was_given or amount is not None
        if step.weights and (amount is None or step.window > 1):
            return step.weights[-1]
        return float(step.samples or 0 if amount is None else amount)

    def warn(self) -> None:
        """Warn once if batches counted by their samples, and there is a sign that they should not."""
        if self._was_given or not self.are_needed or not self._differ or not self._once.is_first("labels"):
            return
        obstacle = "" if self._obstacle is None else f", which does not work with `{self._obstacle}`"
        logger.warning(
            "some labels are ignored, or count more than others, and batches counted by their samples: gradients are "
            "not those of one process. Say how much each batch counts: pass `weight=` to `self.backward`, or return it "
            "from `forward` after the loss%s",
            obstacle,
        )

    def end_call(self) -> None:
        """Let what is computed until the next call count by samples."""
        self.are_needed = False
        self._count_by_labels(False)


def mean_amount(amounts: Sequence[Any]) -> Any:
    """Return what the means of a batch are over, of which there is mostly one; None for samples."""
    return sum(amounts) / len(amounts) if amounts else None


def weights_of(counts: Mapping[str, Any], **amounts: Any) -> dict[str, Any]:
    """Return what single metrics of a batch are averaged by, as it reports it.

    Args:
        counts: What the other metrics are averaged by.
        amounts: What a metric is the mean over; None where it is like the others.
    """
    usual = counts.get(BATCH_WEIGHT, counts[NUM_SAMPLES])
    are_special = {name: isinstance(each, torch.Tensor) or each not in (None, usual) for name, each in amounts.items()}
    return {weight_of(name): amounts[name] for name, is_special in are_special.items() if is_special}
