"""Arguments of `register`: one object or several, in whatever container, handed back in the same one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from raysgd.exceptions import InvalidRegistrationError
from raysgd.worker.parts import RegisteredParts, parts_of

logger = logging.getLogger(__name__)


def models_of(given: Any) -> RegisteredParts:
    """One module (iterable or not) or several.

    Raises:
        InvalidRegistrationError: If anything in it is no module, or there is none.
    """
    what = "a `torch.nn.Module` (criteria go into `criterion`, loaders into `register_data`)"
    return parts_of("models", given, lambda item: isinstance(item, torch.nn.Module), what)


def optimizers_of(given: Any) -> RegisteredParts:
    """One optimizer, also one that merely behaves like one, or several.

    Raises:
        InvalidRegistrationError: If anything in it cannot step.
    """
    parts = parts_of("optimizers", given, _steps, "an optimizer, which has a `step`", may_be_empty=True)
    for optimizer in parts.items:
        _check_parameters(optimizer)
    return parts


def _check_parameters(optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(groups, list) and not any(group["params"] for group in groups):
        raise InvalidRegistrationError(
            f"`register(optimizers=...)` got a `{type(optimizer).__name__}` without parameters, which trains nothing: "
            "make it with `model.parameters()` of a model that has some."
        )


def criterion_of(given: Any) -> Any:
    """The criterion, or None when none was given.

    Raises:
        InvalidRegistrationError: It cannot be called.
    """
    if not given:
        return None
    if not callable(given) or isinstance(given, type):
        raise InvalidRegistrationError(
            f"`register(criterion={given!s:.100})`: pass a loss module such as `torch.nn.MSELoss()`, or a function of "
            "output and target."
        )
    return given


def check_loader(name: str, given: Any, *, warn: bool = True) -> None:
    """Refuses what yields no batches, and warns of a dataset that may yield samples.

    Raises:
        InvalidRegistrationError: It cannot be iterated over, or yields samples.
    """
    can_be_iterated = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    if given is not None and (not can_be_iterated or isinstance(given, type | str | bytes | Mapping)):
        raise InvalidRegistrationError(
            f"`register_data({name}={given!s:.100})`: pass a `DataLoader`, or something else that yields batches."
        )
    inner = given
    while isinstance(inner, Subset):
        inner = inner.dataset
    if isinstance(inner, TensorDataset):
        raise InvalidRegistrationError(
            f"`register_data({name}=...)` got a `{type(given).__name__}`, whose samples would be batches of one: wrap "
            f"it in a loader, `{name}=DataLoader(dataset, batch_size=32, shuffle=True)`."
        )
    if warn and isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        logger.warning(
            "`register_data(%s=...)` got a `%s`, and each worker takes all its items as batches. If they are samples, "
            "wrap it in a loader: `%s=DataLoader(dataset, batch_size=32, shuffle=True)`",
            name,
            type(given).__name__,
            name,
        )


def schedulers_of(given: Any) -> RegisteredParts | None:
    """One scheduler or several; None when none were given. An empty container counts as given."""
    if given is None or given is False:
        return None
    return parts_of("schedulers", given, _steps, "a scheduler, which has a `step`", may_be_empty=True)


def _steps(item: Any) -> bool:
    return hasattr(item, "step") and not isinstance(item, type)


def own_parameters(part: Any, models: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Parameters of a criterion that are not those of a model which it looks at."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    parameters = part.parameters() if isinstance(part, torch.nn.Module) else ()
    return [parameter for parameter in parameters if id(parameter) not in known]


def outsiders(optimizers: Sequence[Any], modules: Iterable[torch.nn.Module], owner: Any) -> list[str]:
    """Parameters of the optimizers that are in none of the modules, in words.

    Args:
        optimizers: Those that were registered, before anything replaces their parameters.
        modules: What is trained together, saved and restored.
        owner: In whose attributes the parameters may have a name.
    """
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return [
        _named(parameter, owner) or f"parameter {index} in group {group_index} of `{type(optimizer).__name__}`"
        for optimizer in optimizers
        for group_index, group in enumerate(getattr(optimizer, "param_groups", ()))
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]


def _named(parameter: Any, owner: Any) -> str | None:
    for name, value in vars(owner).items():
        if value is parameter:
            return f"`self.{name}`"
        for inner, each in value.named_parameters() if isinstance(value, torch.nn.Module) else ():
            if each is parameter:
                return f"`self.{name}.{inner}`"
    return None
