"""Accuracy: the share of right predictions, where a prediction is what the criterion takes for one.

Outputs alone do not tell where their classes are: scores of shape `(samples, 5, 5)` may hold five classes in either
dimension, and a single number per sample may be a logit, a probability or a value. The losses of PyTorch say so, and
what they are called with is watched. For any other criterion the shapes decide, where only one reading fits them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from raysgd._text.log_lines import Once
from raysgd.torch.objects.criteria import IGNORED, LossCall, are_classes, in_host

logger = logging.getLogger(__name__)


class Accuracy(NamedTuple):
    """The share of right predictions.

    Attributes:
        share: The share of the labels that are predicted right; NaN where nothing is classified.
        num_labels: How many labels that is of; None where nothing is classified.
    """

    share: Any = math.nan
    num_labels: Any = None


def accuracy(
    output: Any, target: Any, comparisons: Sequence[LossCall] = (), weight: Any = None, ignored: int = IGNORED
) -> Accuracy | None:
    """Compare predictions with targets: one label for each sample, or for each pixel and the like.

    Labels that the criterion ignores do not count.

    Args:
        output: What the model returned.
        target: The target in the batch.
        comparisons: What the criterion was called with.
        weight: How much the batch counts, if user code says so.
        ignored: The label that a criterion of the user's ignores.

    Returns:
        Numbers, or tensors with one; None where it is not known what they are.
    """
    if len(comparisons) > 1:
        comparisons = [each for each in comparisons if each.output is output]
    if len(comparisons) == 1:
        return _as_read(comparisons[0])
    if not isinstance(output, torch.Tensor) or not are_classes(target):
        return Accuracy()
    found = _by_shapes(output, target, (target >= 0) & (target != ignored))  # no class has a negative number
    return None if found is not None and _leaves_out(weight, found, len(target)) else found


def _leaves_out(weight: Any, found: Accuracy, num_samples: int) -> bool:
    """Return whether a weight is a number of labels, and not that of all of them: it is unknown which are ignored."""
    if weight is None or found.num_labels is None:
        return False
    number = float(weight)
    return number.is_integer() and number < found.num_labels and number != num_samples


def known(found: Accuracy | None, once: Once, *, says_so: bool) -> Accuracy:
    """NaN for an accuracy that the library cannot tell, and a warning once, on the worker that `says_so`."""
    if found is not None:
        return found
    if once.is_first("accuracy") and says_so:
        logger.warning(
            "`val_accuracy` is NaN: the shapes of outputs and targets do not tell where the classes are, or what "
            "one number per sample means, or which labels are ignored. Use a loss of PyTorch as `self.criterion`, such "
            "as `CrossEntropyLoss` (classes in dimension 1) or `BCEWithLogitsLoss`, or override `validate_batch` and "
            "return it yourself"
        )
    return Accuracy()


def _as_read(found: LossCall) -> Accuracy:
    output, target = found.output, found.target
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return Accuracy()
    if found.reading == "classes":
        place = min(1, output.ndim - 1)
        return _largest(output, target, place, found.counting) if are_classes(target) else Accuracy()
    if found.reading == "values" or output.shape != target.shape:
        return Accuracy()
    return _above(0.0 if found.reading == "logits" else 0.5, output, target)


def _by_shapes(output: torch.Tensor, target: torch.Tensor, counting: torch.Tensor) -> Accuracy | None:
    if output.ndim < 2:
        output = output.reshape(-1, 1)
    places = [dim for dim in {1, output.ndim - 1} if _fit(output, target, dim)]
    if not places:
        return Accuracy()
    if len(places) > 1 or output.shape[places[0]] == 1:
        return None
    return _largest(output, target, places[0], counting)


def _fit(output: torch.Tensor, target: torch.Tensor, dim: int) -> bool:
    """Return whether there is a target for each place, if the classes are in dimension `dim`."""
    places = [size for index, size in enumerate(output.shape) if index != dim]
    return [size for size in places if size != 1] == [size for size in target.shape if size != 1]


def _largest(output: torch.Tensor, target: torch.Tensor, dim: int, counting: torch.Tensor | None) -> Accuracy:
    predicted = output.argmax(dim=dim)
    if predicted.numel() != target.numel():
        return Accuracy()
    hits = predicted.reshape(-1) == target.reshape(-1)
    if counting is None:
        return _of(hits.sum(), hits.numel())
    return _of((hits & counting.reshape(-1)).sum(), in_host(counting.sum()))


def _above(threshold: float, output: torch.Tensor, target: torch.Tensor) -> Accuracy:
    """Compare true and false; targets between them are probabilities, of which none is right or wrong."""
    found = _of(((output > threshold) == (target > 0.5)).sum(), target.numel())
    are_certain = ((target == 0) | (target == 1)).all()
    return found._replace(share=torch.where(are_certain, found.share, math.nan))


def _of(num_hits: torch.Tensor, num_labels: Any) -> Accuracy:
    return Accuracy(num_hits / num_labels, num_labels)
