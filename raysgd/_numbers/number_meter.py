"""The running mean of one metric whose values are numbers, or tensors that are read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd._numbers.weights import as_weight, weight_of

# Tensors that may wait to be read, for each metric: reading waits for the device, keeping takes its memory.
MAX_PENDING = 256

_PLAIN_NUMBERS = frozenset({float, int, bool})
_UNREAD = object()

ToFloats = Callable[[list[Any]], list[float]]


class NumberMeter:
    """Sum, weight and last value of one metric, with the tensors that were not read yet."""

    __slots__ = ("_last", "_name", "_to_floats", "_weights", "count", "pending", "total", "weight_name")

    def __init__(self, name: str, to_floats: ToFloats) -> None:
        self._name, self.weight_name = name, weight_of(name)
        self._to_floats = to_floats
        self._last: Any = _UNREAD
        self._weights: list[int | float | None] = []  # None: it is a tensor, which waits behind that of the value
        self.pending: list[Any] = []
        self.total = 0.0
        self.count: int | float = 0

    def add(self, value: Any, weight: Any) -> None:
        kind = type(value)
        if kind in _PLAIN_NUMBERS:
            number = value
        elif is_tensor(kind):
            if value.numel() != 1:
                raise ValueError(_not_one_element(self._name, tuple(value.shape)))
            if not getattr(value, "is_cpu", False):
                self._defer(value, weight)
                return
            number = value.item()
        else:
            number = _as_float(self._name, value)
        self._last = number
        self._count(number, weight if type(weight) is int else self._checked(weight))

    def add_total(self, total: float, count: float, last: Any) -> None:
        """Count what was summed up elsewhere; the last value there counts where there is none here."""
        self.total += total
        self.count += count
        if self._last is _UNREAD and not self.pending:
            self._last = last

    def drop(self) -> None:
        """Nothing: it has what was counted to itself."""

    def fold(self, floats: list[float]) -> None:
        """Replace the pending tensors by their values."""
        numbers = iter(floats)
        for weight in self._weights:
            number = next(numbers)
            self._count(number, self._checked(next(numbers)) if weight is None else weight)
        if self._last is _UNREAD:
            self._last = number
        self.pending.clear()
        self._weights.clear()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    @property
    def last(self) -> Any:
        return self._last

    def _count(self, number: float, weight: int | float) -> None:
        if weight:  # a padding batch may well hold NaN, and 0 * NaN is NaN
            self.total += number * weight
            self.count += weight

    def _checked(self, weight: Any) -> int | float:
        return as_weight(weight_of(self._name), weight)

    def _defer(self, tensor: Any, weight: Any) -> None:
        # A copy, not an alias: user code may go on accumulating in place, and a replayed CUDA graph writes
        # each batch's loss to the same memory.
        self.pending.append(tensor.detach().clone())
        waits = type(weight) is not int and is_tensor(type(weight))
        if waits:
            self.pending.append(weight.detach().clone())
        self._weights.append(None if waits else weight if type(weight) is int else self._checked(weight))
        self._last = _UNREAD
        if len(self.pending) >= MAX_PENDING:
            self.fold(self._to_floats(self.pending))


def is_tensor(kind: type) -> bool:
    return hasattr(kind, "detach")


def float_each(tensors: list[Any]) -> list[float]:
    return [float(tensor) for tensor in tensors]


def _as_float(name: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise TypeError(
            f"metric `{name}` is a `{type(value).__name__}`: allowed are numbers, tensors with one element, "
            "and metric objects of torchmetrics where the operator supports them. Reduce it to one number, "
            "or omit it."
        )
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError) as error:
        raise ValueError(_not_one_element(name, getattr(value, "shape", ()))) from error


def _not_one_element(name: str, shape: Any) -> str:
    return (
        f"metric `{name}` has shape `{tuple(shape)}`: a metric is one number for each batch, so exactly one "
        "element is allowed. Reduce it first, for example with `.mean()`, or report its parts one by one."
    )
