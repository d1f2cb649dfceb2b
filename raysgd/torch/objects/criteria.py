"""The losses of PyTorch as criteria: how they read outputs and targets, and which labels their mean is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

IGNORED = -100
"""The label that the losses of PyTorch ignore, unless they are told otherwise."""

Reading = Literal["classes", "logits", "probabilities", "values"]
"""The kinds of outputs, as a criterion takes them."""


class LossCall(NamedTuple):
    """A call of a loss of PyTorch.

    Attributes:
        reading: What the output is to it.
        output: What it was called with.
        target: What it compared that with.
        result: What it returned.
        counting: Where there are labels that count; None if it knows of none that do not.
        amount: What its mean was divided by: a number, or a tensor on a GPU; None for samples.
        is_uneven: Whether some labels count less than others in this mean.
    """

    reading: Reading
    output: Any
    target: Any
    result: Any
    counting: Any = None
    amount: Any = None
    is_uneven: Any = False


class _Loss(NamedTuple):
    reading: Reading
    counts_labels: bool = False


_FUSED = getattr(torch.nn, "LinearCrossEntropyLoss", None)  # of later versions; its outputs are not scores yet
_LOSSES: dict[Any, _Loss] = {
    called: loss
    for module, function, loss in (
        (_FUSED, None, _Loss("values", counts_labels=True)),
        (torch.nn.CrossEntropyLoss, functional.cross_entropy, _Loss("classes", counts_labels=True)),
        (torch.nn.NLLLoss, functional.nll_loss, _Loss("classes", counts_labels=True)),
        (torch.nn.MultiMarginLoss, functional.multi_margin_loss, _Loss("classes")),
        (torch.nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, _Loss("logits")),
        (torch.nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, _Loss("logits")),
        (torch.nn.BCELoss, functional.binary_cross_entropy, _Loss("probabilities")),
        (torch.nn.MSELoss, functional.mse_loss, _Loss("values")),
        (torch.nn.L1Loss, functional.l1_loss, _Loss("values")),
        (torch.nn.SmoothL1Loss, functional.smooth_l1_loss, _Loss("values")),
        (torch.nn.HuberLoss, functional.huber_loss, _Loss("values")),
        (torch.nn.PoissonNLLLoss, functional.poisson_nll_loss, _Loss("values")),
        (torch.nn.GaussianNLLLoss, functional.gaussian_nll_loss, _Loss("values")),
    )
    if module is not None
    for called in (module.forward, function)
    if called is not None
}
"""By what is called: the method of a module, which subclasses may have, or the function."""


class LossCalls:
    """Tells listeners how the losses of PyTorch in a criterion, itself included, are called."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[LossCall], None]] = []
        self._hooked: Any = None

    @contextmanager
    def on(self, criterion: Any, listener: Callable[[LossCall], None], only_labels: bool = False) -> Iterator[None]:
        """Let `listener` hear of all calls inside the block; with `only_labels` of those that may leave labels out."""
        before, takes_hooks, handles = self._hooked, _takes_hooks(criterion), []
        for part in criterion.modules() if takes_hooks else ():
            loss = _known(part)
            if loss is not None and (loss.counts_labels or not only_labels):
                hear = partial(_tell, listener, loss)
                handles.append(part.register_forward_hook(hear, with_kwargs=True))
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
            whole = getattr(criterion, "_orig_mod", criterion)
            loss = _known(whole)
            for listener in self._listeners if loss is not None else ():
                _tell(listener, loss, whole, (output, target), {}, result)
        return result


def ignored_by(criterion: Any) -> int:
    """Return the label that a criterion ignores, whatever it does with it."""
    ignored = _setting(criterion, "ignore_index")
    return ignored if isinstance(ignored, int) else IGNORED


def in_host(number: torch.Tensor) -> Any:
    """Return the number where it can be read without waiting for a device; else the tensor."""
    return number.item() if number.device.type == "cpu" else number


def are_classes(target: Any) -> bool:
    """Tell whether a target may hold the numbers of classes: floats are values or probabilities."""
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()


def _takes_hooks(criterion: Any) -> bool:
    """Tell whether it is a module that a hook does not have compiled again."""
    is_compiled = hasattr(criterion, "_orig_mod") or getattr(criterion, "_compiled_call_impl", None) is not None
    return isinstance(criterion, torch.nn.Module) and not is_compiled


def _known(part: Any) -> _Loss | None:
    """Return what is known about a loss; nothing about a subclass that is called in another way."""
    key = type(part).forward if isinstance(part, torch.nn.Module) else part.func if isinstance(part, partial) else part
    return _LOSSES.get(key) if callable(key) else None


def _tell(
    listener: Callable[[LossCall], None],
    loss: _Loss,
    part: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> None:
    """Tell of a call with these arguments, and of the labels that count in it, each by the weight of its class."""
    output = args[0] if args else kwargs.get("input")
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if not loss.counts_labels or not are_classes(target):
        listener(LossCall(loss.reading, output, target, result))
        return
    counting = target != ignored_by(part)
    if _setting(part, "reduction") not in (None, "mean"):
        listener(LossCall(loss.reading, output, target, result, counting))
        return
    weights = _setting(part, "weight")
    if isinstance(weights, torch.Tensor) and not isinstance(weights, torch.nn.Parameter):
        of_labels = weights[target.where(counting, 0)]
        amount, is_uneven = in_host(of_labels.where(counting, 0.0).sum(dtype=torch.float64)), True
    else:
        amount = in_host(counting.sum())
        is_uneven = amount != target.numel()
    listener(LossCall(loss.reading, output, target, result, counting, amount, is_uneven))


def _setting(criterion: Any, name: str) -> Any:
    return criterion.keywords.get(name) if isinstance(criterion, partial) else getattr(criterion, name, None)
