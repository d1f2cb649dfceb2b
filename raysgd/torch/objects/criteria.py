"""The losses of PyTorch as criteria: how they read outputs and targets, and which labels their mean is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

IGNORED = -100
"""The label that the losses of PyTorch ignore, unless they are told otherwise."""

Reading = Literal["classes", "logits", "probabilities", "values"]
"""The kinds of outputs, as a criterion takes them."""


@dataclass(frozen=True, eq=False)
class CountedLabels:
    """The labels that a mean is over: all but the ignored ones, each by the weight of its class.

    Attributes:
        ignored: The label that does not count.
        class_weights: By how much the labels of each class count; None if all count alike.
    """

    ignored: int
    class_weights: torch.Tensor | None

    @classmethod
    def of(cls, criterion: Any) -> CountedLabels:
        """Return those that the settings of a criterion name, whatever it does with them."""
        ignored, weights = _setting(criterion, "ignore_index"), _setting(criterion, "weight")
        is_given = isinstance(weights, torch.Tensor) and not isinstance(weights, torch.nn.Parameter)
        return cls(ignored if isinstance(ignored, int) else IGNORED, weights if is_given else None)

    def counting(self, target: torch.Tensor) -> torch.Tensor:
        """Return where there are labels that count."""
        return target != self.ignored

    def amount(self, target: torch.Tensor) -> Any:
        """Return what a mean over them is divided by."""
        counting = self.counting(target)
        if self.class_weights is None:
            return in_host(counting.sum())
        weights = self.class_weights[target.where(counting, 0)]
        return in_host(weights.where(counting, 0.0).sum(dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class LossCall:
    """A call of a loss of PyTorch.

    Attributes:
        reading: What the output is to it.
        output: What it was called with.
        target: What it compared that with.
        labels: The labels that count; None if it knows of none that do not.
        is_mean: Whether it returns the mean over them.
        result: What it returned.
    """

    reading: Reading
    output: Any
    target: Any
    labels: CountedLabels | None
    is_mean: bool
    result: Any

    @property
    def amount(self) -> Any:
        """The amount that its mean is over: a number or a tensor; None for samples."""
        return self.labels.amount(self.target) if self.labels is not None and self.is_mean else None


class _Loss(NamedTuple):
    module: type[torch.nn.Module]
    function: Callable[..., Any] | None
    reading: Reading
    counts_labels: bool = False


_FUSED = getattr(torch.nn, "LinearCrossEntropyLoss", None)  # of later versions; its outputs are not scores yet
_LOSSES = (
    *([_Loss(_FUSED, None, "values", counts_labels=True)] if _FUSED is not None else []),
    _Loss(torch.nn.CrossEntropyLoss, functional.cross_entropy, "classes", counts_labels=True),
    _Loss(torch.nn.NLLLoss, functional.nll_loss, "classes", counts_labels=True),
    _Loss(torch.nn.MultiMarginLoss, functional.multi_margin_loss, "classes"),
    _Loss(torch.nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, "logits"),
    _Loss(torch.nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, "logits"),
    _Loss(torch.nn.BCELoss, functional.binary_cross_entropy, "probabilities"),
    _Loss(torch.nn.MSELoss, functional.mse_loss, "values"),
    _Loss(torch.nn.L1Loss, functional.l1_loss, "values"),
    _Loss(torch.nn.SmoothL1Loss, functional.smooth_l1_loss, "values"),
    _Loss(torch.nn.HuberLoss, functional.huber_loss, "values"),
    _Loss(torch.nn.PoissonNLLLoss, functional.poisson_nll_loss, "values"),
    _Loss(torch.nn.GaussianNLLLoss, functional.gaussian_nll_loss, "values"),
)


class LossCalls:
    """Tells listeners how the losses of PyTorch in a criterion, itself included, are called."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[LossCall], None]] = []
        self._hooked: Any = None

    @contextmanager
    def on(self, criterion: Any, listener: Callable[[LossCall], None], only_labels: bool = False) -> Iterator[None]:
        """Let `listener` hear of all calls inside the block; with `only_labels` of those that may leave labels out."""
        before, takes_hooks = self._hooked, _takes_hooks(criterion)
        hooked = [(each, loss) for each, loss in losses_in(criterion) if loss.counts_labels or not only_labels]
        handles = [
            each.register_forward_hook(partial(_tell, listener, loss), with_kwargs=True)
            for each, loss in (hooked if takes_hooks else ())
        ]
        self._listeners.append(listener)
        self._hooked = criterion if takes_hooks else None
        try:
            yield
        finally:
            self._hooked = before
            self._listeners.remove(listener)
            for handle in handles:
                handle.remove()

    def call(self, criterion: Any, output: Any, target: Any) -> Any:
        """Call a criterion, of which listeners hear also if it takes no hooks."""
        result = criterion(output, target)
        if criterion is not self._hooked and self._listeners and not _takes_hooks(criterion):
            comparison = compared_by(criterion, output, target, result)
            if comparison is not None:
                for listener in self._listeners:
                    listener(comparison)
        return result


def losses_in(criterion: Any) -> list[tuple[Any, _Loss]]:
    """Return the losses of PyTorch in a criterion, and what is known about each."""
    whole = getattr(criterion, "_orig_mod", criterion)
    parts = whole.modules() if isinstance(whole, torch.nn.Module) else (whole,)
    return [(part, loss) for part in parts if (loss := _known(part)) is not None]


def compared_by(criterion: Any, output: Any, target: Any, result: Any = None) -> LossCall | None:
    """Return what `criterion(output, target)` compares; None if it is not one of the losses of PyTorch."""
    whole = getattr(criterion, "_orig_mod", criterion)
    loss = _known(whole)
    return None if loss is None else _comparison(whole, loss, output, target, result)


def in_host(number: torch.Tensor) -> Any:
    """Return the number where it can be read without waiting for a device; else the tensor."""
    return number.item() if number.device.type == "cpu" else number


def _takes_hooks(criterion: Any) -> bool:
    """Tell whether it is a module that a hook does not have compiled again."""
    is_compiled = hasattr(criterion, "_orig_mod") or getattr(criterion, "_compiled_call_impl", None) is not None
    return isinstance(criterion, torch.nn.Module) and not is_compiled


def _known(part: Any) -> _Loss | None:
    """Return what is known about a loss; nothing about a subclass that is called in another way."""
    if isinstance(part, torch.nn.Module):
        return next((loss for loss in _LOSSES if loss.module.forward is type(part).forward), None)
    function = part.func if isinstance(part, partial) else part
    return next((loss for loss in _LOSSES if loss.function is function), None) if callable(function) else None


def _tell(
    listener: Callable[[LossCall], None],
    loss: _Loss,
    part: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    output = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    listener(_comparison(part, loss, output, target, result))


def _comparison(part: Any, loss: _Loss, output: Any, target: Any, result: Any) -> LossCall:
    labels = CountedLabels.of(part) if loss.counts_labels and are_classes(target) else None
    return LossCall(loss.reading, output, target, labels, _is_mean(part), result)


def are_classes(target: Any) -> bool:
    """Tell whether a target may hold the numbers of classes: floats are values or probabilities."""
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()


def _is_mean(part: Any) -> bool:
    return _setting(part, "reduction") in (None, "mean")


def _setting(criterion: Any, name: str) -> Any:
    return criterion.keywords.get(name) if isinstance(criterion, partial) else getattr(criterion, name, None)
