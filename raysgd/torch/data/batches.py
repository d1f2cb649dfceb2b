"""Splits batches into inputs and target, reads model outputs, and collates samples, for the operator's default methods.

A batch is one of:

- a sequence with the target last
- a mapping of names to tensors, such as collators for language models create
- a dataclass whose fields are tensors

A model returns its output: a tensor, a mapping, or another object. A mapping or an object may contain the loss, under
the key or attribute `loss`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import default_collate

from raysgd.core.arrays import trees
from raysgd.core.arrays.user_data import BatchForm, formed, stacked
from raysgd.core.text.tracebacks import defined_at
from raysgd.torch.parallel.tensors import unwrap

_MOST_BYTES_COPIED = 2**20

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""Names of the target in a batch with named parts. If a batch has several of them, the first in this order is used."""


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a batch.

    The target of a sequence is its last element, and the other elements are the inputs. If a named tuple has a field
    with one of the `TARGET_NAMES`, that field is the target instead. A mapping or a dataclass is a single input. Its
    target is the value with one of the `TARGET_NAMES`, or None.

    Raises:
        TypeError: The batch cannot be split.
    """
    if type(batch) in (list, tuple) and batch:
        return tuple(batch[:-1]), batch[-1]
    named = by_name(batch)
    if named is not None:
        return (batch,), next((named[name] for name in TARGET_NAMES if name in named), None)
    if isinstance(batch, torch.Tensor | str) or not isinstance(batch, Iterable):
        raise TypeError(
            f"The stock methods cannot use a batch that is a `{type(batch).__name__}`: they need inputs and target, as "
            "a tuple with the target last, or as a dict or a dataclass with one of the names "
            f"{', '.join(TARGET_NAMES)}. Change what the loader's `collate_fn` returns, or override "
            "`prepare_batch(self, batch)`, which returns `(inputs, target)`."
        )
    parts = list(batch)
    if not parts:
        raise TypeError("The stock methods cannot use an empty batch: they need inputs and target.")
    names = getattr(batch, "_fields", ())
    target = parts.pop(next((names.index(name) for name in TARGET_NAMES if name in names), len(parts) - 1))
    return tuple(parts), target


def by_name(value: Any) -> Mapping[str, Any] | None:
    """Return the values of a mapping or a dataclass by name; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if not is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in fields(value)}


def call_model(model: Callable[..., Any], features: Sequence[Any]) -> Any:
    """Call a model with the inputs of a batch, and return its output.

    If the only input is a dict or dataclass, its entries are passed as keyword arguments. Targets among these entries
    are omitted if the model does not accept them.
    """
    named = by_name(features[0]) if len(features) == 1 else None
    if named is None:
        return model(*features)
    model_class: Any = type(unwrap(model)) if isinstance(model, torch.nn.Module) else None
    surplus = frozenset() if model_class is None else _targets_not_taken(model_class)
    return model(**{name: value for name, value in named.items() if name not in surplus})


def inputs(prepare: Callable[[Any], Any], batch: Any, has_target: bool, model: Any) -> Sequence[Any]:
    """Return the inputs of a batch for a prediction, without a target.

    Args:
        prepare: The operator's `prepare_batch`, which splits a batch into inputs and target.
        batch: Batch to predict, with or without a target.
        has_target: True if the last element of a tuple batch is the target. If False, `prepare` gets the batch with
            None as target.
        model: Model that predicts. If the batch is a dict or dataclass, a target in it is passed only to a model that
            requires it.
    """
    if by_name(batch) is not None:
        features, _ = prepare(batch)
        return tuple(part if by_name(part) is None else _without_targets(part, model) for part in features)
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    features, _ = prepare(parts if has_target else (*parts, None))
    return features if isinstance(features, tuple | list) else (features,)


def _without_targets(features: Any, model: Any) -> dict[str, Any]:
    forward = type(unwrap(model)).forward if isinstance(model, torch.nn.Module) else model
    parameters = inspect.signature(forward).parameters.values()
    required = {each.name for each in parameters if each.default is each.empty}
    named = by_name(features) or {}
    return {name: value for name, value in named.items() if name not in TARGET_NAMES or name in required}


@lru_cache(maxsize=64)
def _targets_not_taken(model_class: Any) -> frozenset[str]:
    """Return the `TARGET_NAMES` that a model's `forward` does not accept as keyword arguments."""
    parameters = inspect.signature(model_class.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return frozenset()
    return frozenset(TARGET_NAMES) - {each.name for each in parameters}


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output; None if the output contains no loss."""
    loss = _named(output, "loss")
    return loss if isinstance(loss, torch.Tensor) else None


def prediction(output: Any) -> Any:
    """Return the part of a model's output to compare with the target: its `logits`, or the output if it has none."""
    if isinstance(output, torch.Tensor):
        return output
    logits = _named(output, "logits")
    return output if logits is None else logits


def without_metrics(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split the dict of metrics off the end of the return value of `forward`.

    Returns:
        Everything before the dict, and the dict. The dict is empty if `forward` returned no metrics.
    """
    if not isinstance(returned, tuple | list) or len(returned) < 2 or not isinstance(returned[-1], Mapping):
        return returned, {}
    *parts, metrics = returned
    return (parts[0] if len(parts) == 1 else tuple(parts)), metrics


def parts_of_forward(returned: Any, operator_cls: type[Any]) -> tuple[Any, torch.Tensor, Any]:
    """Split the return value of `forward` into output, loss and weight. A missing output or weight is None.

    Args:
        returned: Return value, without metrics.
        operator_cls: Class of the operator, for errors.

    Raises:
        TypeError: `forward` returned an unsupported value.
    """
    if isinstance(returned, torch.Tensor) and returned.ndim == 0:
        return None, returned, None
    names_loss = "loss" in getattr(returned, "_fields", ())
    if isinstance(returned, tuple | list) and len(returned) in (2, 3) and not names_loss:
        output, loss, *weight = returned
        return output, loss, weight[0] if weight else None
    loss = own_loss(returned)
    if loss is not None:
        return returned, loss, None
    raise TypeError(
        f"`forward` returned a `{type(returned).__name__}`: return the loss, `(output, loss)`, or `(output, loss, "
        f"weight)`; each may have a dict of metrics after it.{defined_at(operator_cls, 'forward')}"
    )


def _named(output: Any, name: str) -> Any:
    if isinstance(output, Mapping):
        return output.get(name)
    is_unnamed = isinstance(output, torch.Tensor | tuple | list) and name not in getattr(output, "_fields", ())
    return None if is_unnamed else getattr(output, name, None)


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch of any structure, inferred from the sizes of its arrays and lists.

    The samples of an array are its entries along the first dimension. In a dict or dataclass, the first array is used.
    In a tuple or list, the last array is usually the target, so its first dimension is taken as the number of samples.
    If the target is a list of dicts, as in object detection, each dict is one sample. A list with a single dict is one
    sample if the dict's arrays differ in length, because the arrays of a collated batch have one entry per sample. If
    the tuple or list contains neither an array nor such a list, the first array in a nested container is used. If there
    is no array at all, each element of the tuple or list is one sample. Any other value counts as one sample.

    Examples:
        >>> count_samples((torch.zeros(3, 8, 8), torch.zeros(4)))
        4
        >>> count_samples({"text": torch.zeros(2, 16)})
        2
        >>> count_samples([{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(0, 4)}, {"boxes": torch.zeros(1, 4)}])
        3
    """
    return samples_of(batch, len(batch) if isinstance(batch, (tuple, list)) else 1)


def samples_of(batch: Any, otherwise: int) -> int:
    """Count samples like `count_samples`, but return `otherwise` if the batch has no array and no list of samples."""
    last = batch[-1] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(last, torch.Tensor) and last.ndim:
        return len(last)
    counted = _counted(batch)
    return otherwise if counted is None else len(counted)


def _counted(batch: Any) -> Any:
    """Return the part of a batch that has one entry per sample. Return None if there is no such part."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if _is_list_of_samples(parts) and (len(parts) > 1 or _is_single_sample(parts[0])):
        return parts
    target = next((part for part in reversed(parts) if _is_array(part) or _is_list_of_samples(part)), None)
    return _first_counted(parts) if target is None else target


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0  # true for tensors (`torch.Size` is a tuple) and NumPy arrays


def _is_list_of_samples(value: Any) -> bool:
    """Return True for a list of samples that were not collated: dicts or dataclasses that all have the same names."""
    first = by_name(value[0]) if isinstance(value, (tuple, list)) and value else None
    if first is None:
        return False
    return all(each is not None and each.keys() == first.keys() for each in map(by_name, value))


def _is_single_sample(value: Any) -> bool:
    """Return True if the arrays of a dict or dataclass differ in length. Those of a collated batch do not."""
    named = by_name(value) or {}
    return len({len(array) for array in named.values() if _is_array(array)}) > 1


def _first_counted(parts: Iterable[Any]) -> Any:
    """Return the first array or list of samples in nested containers; None if there is neither."""
    for part in parts:
        if _is_array(part) or _is_list_of_samples(part):
            return part
        named = by_name(part)
        inner = named.values() if named is not None else part if isinstance(part, (tuple, list)) else ()
        found = _first_counted(inner)
        if found is not None:
            return found
    return None


class TensorCollate:
    """Collates rows into batches of tensors, as a `DataLoader` does by default."""

    def __call__(self, rows: list[Any]) -> Any:
        return default_collate(rows)

    def join(self, batches: list[Any]) -> Any:
        """Concatenate several batches into one."""
        return batches[0] if len(batches) == 1 else _joined_batches(batches)

    def begin_process(self) -> None:
        """Prepare a process that loads data. Called when the process has started.

        PyTorch is limited to one thread, because OpenMP threads do not survive a fork. Small tensors are sent to the
        worker as copies instead of in shared memory.
        """
        torch.set_num_threads(1)
        ForkingPickler.register(torch.Tensor, _reduced)


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the function and arguments with which pickle recreates a tensor that a loader process sends to the worker.

    By default, PyTorch shares the tensor's memory. The worker must then contact the loader process. Copying a small
    tensor is cheaper.
    """
    with suppress(TypeError, RuntimeError):  # raised if NumPy lacks the dtype (bfloat16), or for a tensor on a GPU
        if tensor.nbytes <= _MOST_BYTES_COPIED:
            return torch.from_numpy, (tensor.numpy(),)
    shared: tuple[Any, ...] = reduce_tensor(tensor)
    return shared


def _joined_batches(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return {name: _joined_batches([batch[name] for batch in batches]) for name in first}
    if first and isinstance(first[0], str | bytes):  # strings are collated to a list, which cannot be concatenated
        return [value for batch in batches for value in batch]
    parts = [_joined_batches(list(each)) for each in zip(*batches, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def as_batch(arrays: Any, form: BatchForm, models: Iterable[torch.nn.Module] = ()) -> Any:
    """Convert arrays to a batch of tensors for an operator.

    Args:
        arrays: An array, or a tuple or dict of arrays, such as the columns of a Ray Data batch.
        form: Names of the columns to use as inputs and target, and the user's function to transform the batch. Without
            names, the batch has the structure of `arrays`.
        models: Models that get the batch. Floating-point values are converted to the dtype of the models' first
            floating-point parameter.
    """
    dtypes = (each.dtype for model in models for each in model.parameters() if each.is_floating_point())
    return formed(trees.mapped(arrays, partial(as_tensor, dtype=next(dtypes, None))), form, _joined)


def as_tensor(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Convert an array to a tensor. Return an array without numbers, such as an array of strings, unchanged.

    Args:
        values: The array, or a tensor.
        dtype: Dtype to which floating-point values are converted. Default: float64 becomes PyTorch's default dtype, and
            other dtypes stay the same.
    """
    if isinstance(values, torch.Tensor):  # not through NumPy, which has no bfloat16
        values = values.detach().clone()
    else:
        values = stacked(values)
        if values.dtype.kind not in "biuf":
            return values
        values = torch.tensor(values)
    if not values.is_floating_point():
        return values
    default = torch.get_default_dtype() if values.dtype == torch.float64 else None
    return values.to(dtype or default or values.dtype)


def _joined(columns: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate columns along the second dimension. A 1-D column becomes a matrix with one column."""
    return torch.cat([column.unsqueeze(1) if column.ndim == 1 else column for column in columns], dim=1)
