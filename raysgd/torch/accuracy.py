"""How often a model's prediction is the target, where a prediction is what the criterion takes for one.

Outputs alone do not tell where their classes are: scores of shape `(samples, 5, 5)` may hold five classes in either
dimension, and a single number per sample may be a logit, a probability or a value. The losses of PyTorch say so, and
what they are called with is watched. For any other criterion the shapes decide, where only one reading fits them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from raysgd._once import Once

logger = logging.getLogger(__name__)

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Outputs and targets, as a criterion was given them -> where the prediction is the target; None: there is none."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a criterion was called with, and how it reads that."""

    rule: Rule
    output: Any
    target: Any


@contextmanager
def watching(criterion: Any) -> Iterator[list[Comparison]]:
    """Notes what the losses of PyTorch in `criterion`, itself included, are called with."""
    seen: list[Comparison] = []
    losses = criterion.modules() if isinstance(criterion, torch.nn.Module) and not _is_compiled(criterion) else ()
    handles = [
        loss.register_forward_pre_hook(partial(_note, seen, rule), with_kwargs=True)
        for loss in losses
        if (rule := _rule_of(loss)) is not None
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_compiled(criterion: torch.nn.Module) -> bool:
    """Whether a hook would have it compiled again."""
    return hasattr(criterion, "_orig_mod") or getattr(criterion, "_compiled_call_impl", None) is not None


def _rule_of(loss: torch.nn.Module) -> Rule | None:
    """That of its class; a subclass that is called in another way has none."""
    return next((rule for known, rule in _RULES_OF_CLASSES if known.forward is type(loss).forward), None)


def _note(
    seen: list[Comparison], rule: Rule, loss: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    output, target, *_ = *args, *kwargs.values(), None, None
    seen.append(Comparison(rule, output, target))


def compared_by(criterion: Any, output: Any, target: Any) -> list[Comparison]:
    """What `watching` would note of `criterion(output, target)`, for a criterion that is a function of PyTorch."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    rule = next((rule for known, rule in _RULES_OF_FUNCTIONS if known is function), None)
    return [] if rule is None else [Comparison(rule, output, target)]


def accuracy(output: Any, target: Any, comparisons: Sequence[Comparison] = ()) -> Any:
    """The share of samples, or of pixels and the like where each has a class, that are predicted right.

    Args:
        output: What the model returned.
        target: The target in the batch. Targets of floats are values or probabilities, not classes.
        comparisons: What the criterion was called with.

    Returns:
        A number, or a tensor with one; NaN where nothing is classified; None where the shapes have several readings.
    """
    if not isinstance(output, torch.Tensor) or not _is_of_classes(target):
        return float("nan")
    if len(comparisons) != 1:
        return _by_shapes(output, target)
    (found,) = comparisons
    return _share(found.rule(found.output, found.target))


def known(found: Any, once: Once, *, says_so: bool) -> Any:
    """NaN for an accuracy that the library cannot tell, and a warning once, on the worker that `says_so`."""
    if found is not None:
        return found
    if once.is_first("accuracy") and says_so:
        logger.warning(
            "`val_accuracy` is NaN: the shapes of outputs and targets do not tell where the classes are, or what "
            "one number per sample means. Use a loss of PyTorch as `self.criterion`, such as `CrossEntropyLoss` "
            "(classes in dimension 1) or `BCEWithLogitsLoss`, or override `validate_batch` and return it yourself"
        )
    return float("nan")


def _by_shapes(output: torch.Tensor, target: torch.Tensor) -> Any:
    if output.ndim < 2:
        output = output.reshape(-1, 1)
    places = [dim for dim in {1, output.ndim - 1} if _fit(output, target, dim)]
    if not places:
        return float("nan")
    if len(places) > 1 or output.shape[places[0]] == 1:
        return None
    return _share(_largest(output, target, places[0]))


def _fit(output: torch.Tensor, target: torch.Tensor, dim: int) -> bool:
    """Whether there is a target for each place, if the classes are in dimension `dim`."""
    places = [size for index, size in enumerate(output.shape) if index != dim]
    return [size for size in places if size != 1] == [size for size in target.shape if size != 1]


def _largest(output: torch.Tensor, target: torch.Tensor, dim: int) -> torch.Tensor | None:
    predicted = output.argmax(dim=dim)
    return predicted.reshape(-1) == target.reshape(-1) if predicted.numel() == target.numel() else None


def _share(hits: torch.Tensor | None) -> Any:
    return hits.sum() / hits.numel() if hits is not None and hits.numel() else float("nan")


def _is_of_classes(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()


def _classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    return _largest(output, target, min(1, output.ndim - 1)) if _is_of_classes(target) else None


def _above(threshold: float, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    return (output > threshold) == (target > 0.5) if output.shape == target.shape else None


def _values(output: torch.Tensor, target: torch.Tensor) -> None:
    return None


_logits, _probabilities = partial(_above, 0.0), partial(_above, 0.5)

_RULES_OF_CLASSES: tuple[tuple[type[torch.nn.Module], Rule], ...] = (
    (torch.nn.CrossEntropyLoss, _classes),
    (torch.nn.NLLLoss, _classes),
    (torch.nn.MultiMarginLoss, _classes),
    (torch.nn.BCEWithLogitsLoss, _logits),
    (torch.nn.MultiLabelSoftMarginLoss, _logits),
    (torch.nn.BCELoss, _probabilities),
    (torch.nn.MSELoss, _values),
    (torch.nn.L1Loss, _values),
    (torch.nn.SmoothL1Loss, _values),
    (torch.nn.HuberLoss, _values),
    (torch.nn.PoissonNLLLoss, _values),
    (torch.nn.GaussianNLLLoss, _values),
)
_RULES_OF_FUNCTIONS: tuple[tuple[Callable[..., Any], Rule], ...] = (
    (functional.cross_entropy, _classes),
    (functional.nll_loss, _classes),
    (functional.multi_margin_loss, _classes),
    (functional.binary_cross_entropy_with_logits, _logits),
    (functional.multilabel_soft_margin_loss, _logits),
    (functional.binary_cross_entropy, _probabilities),
    (functional.mse_loss, _values),
    (functional.l1_loss, _values),
    (functional.smooth_l1_loss, _values),
    (functional.huber_loss, _values),
    (functional.poisson_nll_loss, _values),
    (functional.gaussian_nll_loss, _values),
)
