"""Access of worker callbacks to an operator, under names that user code does not take."""

from __future__ import annotations

from typing import Any


def optimizers_of(operator: Any) -> list[Any]:
    """The registered optimizers."""
    return list(operator._raysgd.registered.optimizers)


def models_of(operator: Any) -> list[Any]:
    """The registered models, without wrappers."""
    return list(operator._raysgd.registered.original_models)


def state_of(operator: Any, key: str) -> Any:
    """Return the state of a worker callback by its `state_key`; None if there is none."""
    return operator._raysgd.callbacks.state_of(key)


def rank_of(operator: Any) -> int:
    """Its rank among all workers."""
    return int(operator._raysgd.world.rank)


def is_sharded(operator: Any) -> bool:
    """Return whether each worker has only a part of the models."""
    return bool(operator._raysgd.parallel.is_sharded)


def index_of(operator: Any, optimizer: Any) -> int:
    """Return which of the registered optimizers it is."""
    return next((index for index, each in enumerate(optimizers_of(operator)) if each is optimizer), 0)


def of_optimizer(name: str, index: int, operator: Any) -> str:
    """A metric of one optimizer: the plain name if there is only one."""
    return f"{name}_optimizer{index}" if len(optimizers_of(operator)) > 1 else name
