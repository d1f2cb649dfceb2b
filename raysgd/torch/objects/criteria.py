"""Observes calls to PyTorch's losses, to weight batches by their labels and to compute the accuracy.

A model's outputs alone do not show how to compute the accuracy. Scores of shape `(samples, 5, 5)` may have five classes
in either dimension, and a single number per sample may be a logit, a probability or a value. Each PyTorch loss
interprets outputs in only one of these ways, so it matters which loss was called. For other criteria, the shapes of
outputs and targets are compared. If the shapes fit more than one interpretation, the accuracy is unknown.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch.nn import functional

from raysgd.core.text.log_lines import Once

logger = logging.getLogger(__name__)

IGNORED = -100
"""The label that PyTorch's losses ignore by default."""

_MOST_IN_LIST = 64  # up to this number of labels, a list of them is counted faster than a tensor

Reading = Literal["classes", "logits", "probabilities", "values"]
"""Interpretation of a model's outputs by a criterion."""


class LossCall(NamedTuple):
    """Record of a call to a PyTorch loss.

    Attributes:
        reading: How the loss interprets the output.
        output: Model output that was passed to the loss.
        target: Target that was passed to the loss.
        result: Return value of the loss; None if `amount` may not be what the return value is a mean over.
        ignored: Label that the loss ignores (`ignore_index`); None if the loss cannot ignore labels.
        amount: Sum of the weights of the labels over which the loss averages: a number, or a tensor if the sum is on a
            GPU. None if the loss does not average over labels.
        num_labels: Number of all labels, including ignored labels; None if labels have class weights, or if the loss
            does not average over labels.
    """

    reading: Reading
    output: Any
    target: Any
    result: Any
    ignored: int | None = None
    amount: Any = None
    num_labels: int | None = None

    @property
    def counting(self) -> torch.Tensor | None:
        """Bool tensor like the target, with False for each ignored label; None if the loss cannot ignore labels."""
        return None if self.ignored is None else self.target != self.ignored

    @property
    def is_uneven(self) -> Any:
        """True if the labels have class weights, or if some labels are ignored.

        The value is a tensor if `amount` is a tensor and the labels have no class weights.
        """
        return self.amount is not None and (self.num_labels is None or self.amount != self.num_labels)


NO_CALL = LossCall("values", None, None, None)


class _Loss(NamedTuple):
    """The way in which a PyTorch loss computes its result.

    Attributes:
        reading: How the loss interprets the output.
        counts_labels: True if the loss averages over labels.
        is_exact: False if user code in a subclass or around the loss may change the result.
    """

    reading: Reading
    counts_labels: bool = False
    is_exact: bool = True


_FUSED = getattr(torch.nn, "LinearCrossEntropyLoss", None)  # newer PyTorch; its inputs are features, not scores
_LOSSES: dict[Any, _Loss] = {
    called: _Loss(*loss)
    for module, function, *loss in (
        (_FUSED, None, "values", True),
        (torch.nn.CrossEntropyLoss, functional.cross_entropy, "classes", True),
        (torch.nn.NLLLoss, functional.nll_loss, "classes", True),
        (torch.nn.MultiMarginLoss, functional.multi_margin_loss, "classes"),
        (torch.nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, "logits"),
        (torch.nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, "logits"),
        (torch.nn.BCELoss, functional.binary_cross_entropy, "probabilities"),
        (torch.nn.MSELoss, functional.mse_loss, "values"),
        (torch.nn.L1Loss, functional.l1_loss, "values"),
        (torch.nn.SmoothL1Loss, functional.smooth_l1_loss, "values"),
        (torch.nn.HuberLoss, functional.huber_loss, "values"),
        (torch.nn.PoissonNLLLoss, functional.poisson_nll_loss, "values"),
        (torch.nn.GaussianNLLLoss, functional.gaussian_nll_loss, "values"),
    )
    if module is not None
    for called in (module.forward, function)
    if called is not None
}
"""The known losses of PyTorch. Keys are functions, and the `forward` methods of modules, which subclasses inherit."""

_OVER_LABELS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, *([_FUSED] if _FUSED is not None else []))
_CHANGED = _Loss("values", counts_labels=True, is_exact=False)
_PARAMETERS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")  # of the functions


class ObservedLoss(torch.nn.Module):
    """A loss over labels that supports forward hooks, around a function or a compiled module that does not.

    It also has the attributes of the loss.

    Args:
        loss: The function, or the module.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        vars(self)["loss"] = loss  # not a submodule, which would get hooks, too

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.loss(*args, **options)

    def __getattr__(self, name: str) -> Any:
        loss = vars(self).get("loss")
        return super().__getattr__(name) if loss is None else getattr(loss, name)


def observable(criterion: Any) -> Any:
    """Return a criterion that notifies listeners also when user code calls it, if it is a loss over labels."""
    loss = None if _takes_hooks(criterion) else _known(criterion)
    return criterion if loss is None or not loss.counts_labels else ObservedLoss(criterion)


class _Copied(NamedTuple):
    """A batch's target in host memory, and its copy on a GPU.

    Attributes:
        original: The target in host memory.
        copy: The target on the GPU.
        versions: PyTorch's version numbers of both tensors, which in-place changes increase.
    """

    original: torch.Tensor
    copy: torch.Tensor
    versions: tuple[int, int]

    def in_host_memory(self, target: torch.Tensor) -> torch.Tensor:
        """Return the original if `target` is its copy and both are unchanged. Otherwise, return `target`."""
        is_same = target is self.copy and self.versions == (self.original._version, self.copy._version)
        return self.original if is_same else target


class LossCalls:
    """Notifies listeners when a PyTorch loss is called: the criterion itself, or a module inside the criterion.

    Attributes:
        makes_all: True if only the method `call` calls the criterion. A criterion that is itself a PyTorch loss then
            needs no forward hook, which costs more than counting the labels of a small batch. Do not set it while
            anyone listens.
    """

    def __init__(self) -> None:
        self.makes_all = False
        self._listeners: list[Callable[[LossCall], None]] = []
        self._hooked: Any = None
        self._copied: _Copied | None = None
        self._called: tuple[Any, Any, _Loss | None] = (None, None, None)  # latest criterion, its `_source`, its entry

    def note_copy(self, original: Any, copy: Any) -> None:
        """Record that a batch's target was copied to a GPU. Its labels are then counted without using the GPU.

        Args:
            original: The target in host memory.
            copy: The target on the GPU.
        """
        can_tell = hasattr(torch.Tensor, "_version")  # otherwise, a change of the copy would not be noticed
        is_known = can_tell and are_classes(original) and original.is_cpu and isinstance(copy, torch.Tensor)
        self._copied = _Copied(original, copy, (original._version, copy._version)) if is_known else None

    @contextmanager
    def on(self, criterion: Any, listener: Callable[[LossCall], None]) -> Iterator[None]:
        """Notify a listener of all calls to the criterion's losses during the `with` block.

        Only calls through the method `call` are noticed if the criterion does not support forward hooks (see
        `observable`), or if it is itself a PyTorch loss and `makes_all` is True.

        Args:
            criterion: Criterion that is or contains a loss.
            listener: Function that gets a `LossCall` for each call to a loss.
        """
        before, handles = self._hooked, []
        takes_hooks = _takes_hooks(criterion) and not (self.makes_all and _known(criterion))
        for part in dict.fromkeys(_observed(criterion)) if takes_hooks else ():
            loss = _known(part)
            if loss is not None:
                hear = partial(self._hear, listener, loss)
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
        """Call a criterion, notify the listeners, and return the loss.

        The listeners are notified even if the criterion does not support forward hooks, for example if it is a
        function.
        """
        result = criterion(output, target)
        if criterion is not self._hooked and self._listeners:
            if criterion is not self._called[0]:
                self._called = criterion, _source(criterion), _known(criterion)
            _, source, loss = self._called
            if loss is not None:
                for listener in self._listeners:
                    self._tell(listener, loss, source, (output, target), {}, result)
        return result

    def _hear(self, listener: Any, loss: _Loss, part: Any, *call: Any) -> None:
        """Notify a listener of a call to a loss. PyTorch calls this forward hook."""
        self._tell(listener, loss, _source(part), *call)

    def _tell(
        self,
        listener: Callable[[LossCall], None],
        loss: _Loss,
        source: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Notify a listener of a call to a loss. If the loss averages over labels, include the sum of their weights.

        Args:
            listener: Function that gets a `LossCall`.
            loss: Entry in `_LOSSES` for the loss.
            source: Function or module with the settings of the loss that was called.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: Return value of the loss.
        """
        output = args[0] if args else kwargs.get("input")
        target = args[1] if len(args) > 1 else kwargs.get("target")
        result = result if loss.is_exact else None
        if not loss.counts_labels or not are_classes(target):
            listener(LossCall(loss.reading, output, target, result))
            return
        ignored, reduction, weights = _settings(source, args, kwargs)
        if reduction not in (None, "mean"):
            listener(LossCall(loss.reading, output, target, result, ignored))
            return
        num_labels = target.numel()
        if isinstance(weights, torch.Tensor) and not isinstance(weights, torch.nn.Parameter):
            counting = target != ignored
            of_labels = weights[target.where(counting, 0)]
            amount = in_host(of_labels.where(counting, 0.0).sum(dtype=torch.float64))
            listener(LossCall(loss.reading, output, target, result, ignored, amount))
            return
        labels = target if self._copied is None else self._copied.in_host_memory(target)
        listener(LossCall(loss.reading, output, target, result, ignored, _number_unlike(ignored, labels), num_labels))


def _number_unlike(ignored: int, labels: torch.Tensor) -> Any:
    """Return how many labels differ from `ignored`: a number, or a tensor if the labels are on a GPU."""
    num_labels = labels.numel()
    if labels.is_cpu and labels.ndim == 1 and num_labels <= _MOST_IN_LIST:
        return num_labels - labels.tolist().count(ignored)
    # Most batches contain no ignored label. If all labels are 0 or larger, none equals a negative `ignored`. Computing
    # the minimum takes a fifth as long as counting.
    are_all_classes = ignored < 0 and num_labels > 0 and labels.is_cpu and labels.min().item() >= 0
    return num_labels if are_all_classes else in_host((labels != ignored).sum())


def counts_labels(criterion: Any) -> bool:
    """Return True if a criterion is or contains a PyTorch loss that averages over labels."""
    parts = _observed(criterion) if _takes_hooks(criterion) else (criterion,)
    return any(loss.counts_labels and loss.is_exact for loss in map(_known, parts) if loss is not None)


def ignored_by(criterion: Any) -> int:
    """Return the label that a criterion ignores: its `ignore_index` or, if it has none, PyTorch's default."""
    return _settings(criterion)[0]


def refuse_sum(criterion: Any) -> None:
    """Check that a criterion does not return the sum over the samples, because gradients are averaged over batches.

    Raises:
        ValueError: The criterion has `reduction="sum"`.
    """
    if _settings(criterion)[1] == "sum":
        raise ValueError(
            'the registered criterion has `reduction="sum"`, but gradients are averaged over the batches of a step, so '
            'training would depend on the number of these batches. Use `reduction="mean"`, or override `forward` and '
            "return `output, loss / len(target)`. Then multiply a learning rate that was chosen for sums by the size "
            "of a batch."
        )


def in_host(number: torch.Tensor) -> Any:
    """Convert a tensor in host memory to a number. Return a tensor on a GPU unchanged, to avoid waiting for the GPU."""
    return number.item() if number.device.type == "cpu" else number


def are_classes(target: Any) -> TypeGuard[torch.Tensor]:
    """Return True if a target may contain class numbers, that is, if it is a tensor of integers or bools."""
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()


def _takes_hooks(criterion: Any) -> bool:
    """Return True if a criterion is a module that supports forward hooks.

    `Module.compile` compiles the hooks of a module, too. `torch.compile` returns a module around the compiled one.
    """
    return isinstance(criterion, torch.nn.Module) and getattr(criterion, "_compiled_call_impl", None) is None


def _observed(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return a module and the modules in it, but none inside a compiled module."""
    if _takes_hooks(part):
        yield part
        for each in () if hasattr(part, "_orig_mod") else part.children():
            yield from _observed(each)


def _inside(part: Any) -> Any:
    """Return the loss inside an `ObservedLoss` or a compiled module."""
    part = part.loss if isinstance(part, ObservedLoss) else part
    return getattr(part, "_orig_mod", part)


def _source(part: Any) -> Any:
    """Return the function or module with the settings of a loss."""
    loss = _inside(part)
    parts = loss.modules() if isinstance(loss, torch.nn.Module) else ()
    return next((each for each in parts if isinstance(each, _OVER_LABELS)), loss)


def _known(part: Any) -> _Loss | None:
    """Return the entry in `_LOSSES` for a criterion, or for a module inside a criterion. Return None if it has none.

    For a subclass of a loss over labels that overrides `forward`, for a decorated or compiled function, and for a
    compiled module that contains such a loss, return `_CHANGED`.
    """
    loss = _inside(part)
    if isinstance(loss, torch.nn.Module):
        is_compiled = part is not loss or not _takes_hooks(loss)
        is_changed = isinstance(_source(loss) if is_compiled else loss, _OVER_LABELS)
        return _LOSSES.get(type(loss).forward) or (_CHANGED if is_changed else None)
    key = loss.func if isinstance(loss, partial) else loss
    if not callable(key):
        return None
    original = _LOSSES.get(inspect.unwrap(key))
    return _LOSSES.get(key) or (_CHANGED if original is not None and original.counts_labels else None)


def _settings(
    criterion: Any, args: Sequence[Any] = (), options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, Any, Any]:
    """Return a criterion's ignored label, its reduction (None if not set), and its class weights (None if not set).

    Args:
        criterion: The criterion. Functions also have settings in the arguments of a call.
        args: Positional arguments of the call.
        options: Keyword arguments of the call.
    """
    loss, called = _inside(criterion), dict[str, Any]()
    if not isinstance(loss, torch.nn.Module):
        called = {**getattr(loss, "keywords", {}), **dict(zip(_PARAMETERS, args, strict=False)), **options}
    ignored, reduction, weight = (
        called.get(name, getattr(loss, name, None)) for name in ("ignore_index", "reduction", "weight")
    )
    return ignored if isinstance(ignored, int) else IGNORED, reduction, weight


class Accuracy(NamedTuple):
    """The fraction of correct predictions in a batch.

    Attributes:
        share: Fraction of the labels that were predicted correctly; NaN if the model does not predict classes.
        num_labels: Number of labels, without ignored labels; None if the model does not predict classes.
    """

    share: Any = math.nan
    num_labels: Any = None


def accuracy(
    output: Any, target: Any, comparisons: Sequence[LossCall] = (), weight: Any = None, ignored: int = IGNORED
) -> Accuracy | None:
    """Compute the fraction of correct predictions in a batch, without labels that the criterion ignores.

    Args:
        output: Output of the model for a batch.
        target: Target of the batch, with a label for each sample, pixel or similar unit.
        comparisons: Records of the calls to PyTorch losses that computed the batch's loss. They show how to interpret
            the output.
        weight: Weight of the batch, if the user's `forward` returned one.
        ignored: Label that the user's criterion ignores.

    Returns:
        An `Accuracy` of numbers or one-element tensors; None if it is unclear how to interpret the outputs, or which
        labels are ignored.
    """
    comparisons = [each for each in comparisons if each.result is not None]
    if len(comparisons) > 1:
        comparisons = [each for each in comparisons if each.output is output]
    if len(comparisons) == 1:
        return _as_read(comparisons[0])
    if not isinstance(output, torch.Tensor) or not are_classes(target):
        return Accuracy()
    found = _by_shapes(output, target, (target >= 0) & (target != ignored))  # class indices are never negative
    return None if found is not None and _leaves_out(weight, found, len(target)) else found


def _leaves_out(weight: Any, found: Accuracy, num_samples: int) -> bool:
    """Return True if user code seems to ignore labels that the library has counted.

    Args:
        weight: Weight of the batch from user code. If it is a whole number below the number of labels, it is probably
            the number of labels that user code does not ignore.
        found: Accuracy, with the number of labels that the library has counted.
        num_samples: Number of samples in the batch. If the weight equals this number, it is probably not a number of
            labels.
    """
    if weight is None or found.num_labels is None:
        return False
    number = float(weight)
    return number.is_integer() and number < found.num_labels and number != num_samples


def known(found: Accuracy | None, once: Once, *, says_so: bool) -> Accuracy:
    """Return an accuracy or, if `accuracy` could not compute it, an accuracy of NaN.

    Args:
        found: What `accuracy` returned; None if the accuracy is unknown.
        once: Remembers which warnings were logged.
        says_so: True to log a warning, once, if the accuracy is unknown.
    """
    if found is not None:
        return found
    if once.is_first("accuracy") and says_so:
        logger.warning(
            "`val_accuracy` is NaN: the shapes of outputs and targets do not show which dimension holds the classes, "
            "what one number per sample means, or which labels are ignored. Use a PyTorch loss as `self.criterion`, "
            "such as `CrossEntropyLoss` (classes in dimension 1) or `BCEWithLogitsLoss`, or override `validate_batch` "
            "and return `val_accuracy` yourself"
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
    """Return True if dimension `dim` of the output may contain the classes.

    This is the case if the output's shape without this dimension is the target's shape. Dimensions of size 1 are
    ignored.
    """
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
    """Compute the accuracy of binary predictions. It is NaN if a target is neither 0 nor 1.

    Args:
        threshold: Outputs above this number predict 1.
        output: Output of the model.
        target: Target, with the same shape.
    """
    found = _of(((output > threshold) == (target > 0.5)).sum(), target.numel())
    are_certain = ((target == 0) | (target == 1)).all()
    return found._replace(share=torch.where(are_certain, found.share, math.nan))


def _of(num_hits: torch.Tensor, num_labels: Any) -> Accuracy:
    return Accuracy(num_hits.double() / num_labels, num_labels)
