"""What the stock rungs make of a batch, and of what `forward` and a model return.

A batch is a sequence with the target last, or a mapping of names to tensors, as collators for language models make it.
A model returns its output; or a mapping, or an object with attributes, that may hold the loss too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from raysgd.torch.parallel import unwrap

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""Under which of these names a batch that is a mapping has its target; the first one that is there counts."""


def split(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Inputs and target of a batch. A mapping is one input; its target is None where it has no known name.

    Raises:
        TypeError: The batch has no parts that could be told apart.
    """
    if isinstance(batch, Mapping):
        return (batch,), next((batch[name] for name in TARGET_NAMES if name in batch), None)
    if isinstance(batch, torch.Tensor | str) or not isinstance(batch, Iterable):
        raise TypeError(
            f"The stock methods cannot use a batch that is a `{type(batch).__name__}`: they need inputs and target, "
            f"as a tuple with the target last, or as a dict with one of the keys {', '.join(TARGET_NAMES)}. Change "
            "what the loader's `collate_fn` returns, or override `prepare_batch(self, batch)`, which returns "
            "`(inputs, target)`."
        )
    *features, target = batch
    return tuple(features), target


def call(model: Callable[..., Any], features: Sequence[Any]) -> Any:
    """The output of a model. A single mapping is passed by keyword, without a target that the model does not take."""
    if len(features) != 1 or not isinstance(features[0], Mapping):
        return model(*features)
    model_class: Any = type(unwrap(model)) if isinstance(model, torch.nn.Module) else None
    surplus = frozenset() if model_class is None else _targets_not_taken(model_class)
    return model(**{name: value for name, value in features[0].items() if name not in surplus})


@lru_cache(maxsize=64)
def _targets_not_taken(model_class: Any) -> frozenset[str]:
    """The names of targets that the forward pass of such a model does not take."""
    parameters = inspect.signature(model_class.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return frozenset()
    return frozenset(TARGET_NAMES) - {each.name for each in parameters}


def own_loss(output: Any) -> torch.Tensor | None:
    """The loss that a model computed by itself; None where its output has none."""
    loss = _named(output, "loss")
    return loss if isinstance(loss, torch.Tensor) else None


def prediction(output: Any) -> Any:
    """What is compared with the target: the logits, where an output names such; else all of it."""
    logits = _named(output, "logits")
    return output if logits is None else logits


def parts_of_forward(returned: Any) -> tuple[Any, torch.Tensor, Any]:
    """Output, loss and weight, each None where `forward` did not return it.

    Raises:
        TypeError: It returned none of what it may return.
    """
    if isinstance(returned, torch.Tensor) and returned.ndim == 0:
        return None, returned, None
    if isinstance(returned, tuple | list) and len(returned) in (2, 3):
        output, loss, *weight = returned
        return output, loss, weight[0] if weight else None
    loss = own_loss(returned)
    if loss is not None:
        return returned, loss, None
    raise TypeError(
        f"`forward` returned a `{type(returned).__name__}`: return the loss, `(output, loss)`, or `(output, loss, "
        "weight)`."
    )


def _named(output: Any, name: str) -> Any:
    if isinstance(output, Mapping):
        return output.get(name)
    return None if isinstance(output, torch.Tensor | tuple | list) else getattr(output, name, None)
