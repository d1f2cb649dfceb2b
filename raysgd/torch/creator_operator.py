"""`CreatorOperator`: an operator whose objects come from creator functions such as `model_creator`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from raysgd.core.arguments import check_creator
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.worker.operator import BaseOperator

logger = logging.getLogger(__name__)


class CreatorOperator(TrainingOperator):
    """A training operator whose model, optimizer, data, loss and scheduler come from creator functions.

    `TrainingOperator.from_creators` returns a subclass of this class. Subclass the returned class to override methods.
    """

    _model_creator: Callable[..., Any]
    _optimizer_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None
    _loss_creator: Any = None
    _scheduler_creator: Callable[..., Any] | None = None
    _serialize_data_creation = True
    _has_created = False

    def setup(self, config: dict[str, Any]) -> None:
        """Call the creator functions and register the objects that they return. If called again, do nothing."""
        if self._has_created:
            return
        self._has_created = True
        loaders = self._create_data(config)
        models = self._model_creator(config)
        optimizers = self._optimizer_creator(models, config)
        schedulers = self._scheduler_creator(optimizers, config) if self._scheduler_creator else None
        criterion = self._create_loss(config)
        self.register(models=models, optimizers=optimizers, criterion=criterion, schedulers=schedulers)
        if _is_multiple(models) or _is_multiple(optimizers):
            logger.info("several models or optimizers: the stock loops use the first of each")
        self.register_data(train_loader=loaders[0], validation_loader=loaders[1])

    def _create_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        if self._data_creator is None:
            return None, None
        with _one_at_a_time() if self._serialize_data_creation else nullcontext():
            loaders = self._data_creator(config)
        if loaders is None or loaders is False or (isinstance(loaders, list | tuple) and not loaders):
            raise InvalidRegistrationError(
                "`data_creator` returned nothing: return a train loader, or train and validation loader."
            )
        if isinstance(loaders, Dataset) and not isinstance(loaders, IterableDataset):
            raise InvalidRegistrationError(
                f"`data_creator` returned a `{type(loaders).__name__}`, whose items are samples: return "
                "`DataLoader(dataset, batch_size=32, shuffle=True)`."
            )
        if not isinstance(loaders, list | tuple):
            return loaders, None
        if len(loaders) > 2:
            raise ValueError(
                f"`data_creator` returned {len(loaders)} loaders: return one (train) or two (train, validation)."
            )
        return loaders[0], loaders[1] if len(loaders) == 2 else None

    def _create_loss(self, config: dict[str, Any]) -> Any:
        creator = self._loss_creator
        if isinstance(creator, type) and _is_loss_of_torch(creator):
            return creator()
        return creator(config) if creator else None

    @property
    def models(self) -> Any:
        """The models that `model_creator` returned, wrapped for distributed training."""
        return self._raysgd.registered.returned[0]

    @property
    def optimizers(self) -> Any:
        """The optimizers that `optimizer_creator` returned."""
        return self._raysgd.registered.returned[1]

    @property
    def schedulers(self) -> Any:
        """The schedulers that `scheduler_creator` returned."""
        registered = self._raysgd.registered
        return registered.returned[-1] if registered.has_schedulers else _absent("schedulers")

    @property
    def model(self) -> torch.nn.Module:
        """The model that `model_creator` returned, or the first of several, wrapped for distributed training."""
        return self._raysgd.registered.models[0]

    @property
    def optimizer(self) -> Any:
        """The optimizer that `optimizer_creator` returned, or the first of several."""
        optimizers = self._raysgd.registered.optimizers
        return optimizers[0] if optimizers else _absent("optimizer")

    @property
    def scheduler(self) -> Any:
        """The scheduler that `scheduler_creator` returned, or the first of several."""
        schedulers = self._raysgd.registered.schedulers
        return schedulers[0] if schedulers else _absent("scheduler")

    @property
    def criterion(self) -> Any:
        """The criterion that `loss_creator` returned."""
        criterion = self._raysgd.registered.criterion
        return criterion if criterion is not None else _absent("criterion")


def _absent(name: str) -> Any:
    raise AttributeError(f"no `{name}`: no creator returned one")


def _is_loss_of_torch(creator: type) -> bool:
    """Return True if `creator` is a PyTorch loss class or a subclass of one. Such a class gets no config."""
    return any(base.__module__ == torch.nn.MSELoss.__module__ for base in creator.__mro__)


def _one_at_a_time() -> Any:
    from filelock import FileLock

    name = f".raydata-{os.getuid()}.lock"  # one lock file per user, because a user cannot open another user's file
    return FileLock(os.path.join(tempfile.gettempdir(), name))


def _is_multiple(component: Any) -> bool:
    """Return True if a creator function returned a container of several objects instead of a single object."""
    return isinstance(component, list | tuple | Mapping) and len(component) > 1


_PARAMETERS = {
    "model_creator": ("config",),
    "optimizer_creator": ("model", "config"),
    "data_creator": ("config",),
    "loss_creator": ("config",),
    "scheduler_creator": ("optimizer", "config"),
}


def make_operator(
    own: type[TrainingOperator], creators: Mapping[str, Any], serialize_data_creation: bool
) -> type[CreatorOperator]:
    """Return an operator class that calls creator functions and inherits the methods of `own`.

    If the user's class has its own `setup`, it runs after the creator functions.

    Args:
        own: Class on which the user called `from_creators`.
        creators: Creator functions by argument name, such as `model_creator`; None for each creator that the user
            omitted.
        serialize_data_creation: True to let only one process on each machine create data at a time.

    Raises:
        ValueError: A creator is not a function that accepts the arguments it is called with.
    """
    for name, parameters in _PARAMETERS.items():
        creator = creators[name]
        is_missing = creator is None and name not in ("model_creator", "optimizer_creator")
        if not is_missing and not (isinstance(creator, type) and _is_loss_of_torch(creator)):
            check_creator(name, creator, *parameters)
    members: dict[str, Any] = {
        f"_{name}": staticmethod(creator) if creator else None for name, creator in creators.items()
    }
    members["_serialize_data_creation"] = serialize_data_creation
    if issubclass(CreatorOperator, own):
        return type("CustomCreatorOperator", (CreatorOperator,), members)

    def setup(self: Any, config: dict[str, Any]) -> None:
        CreatorOperator.setup(self, config)
        if own.setup is not BaseOperator.setup:
            own.setup(self, config)

    members |= {"setup": setup, "__module__": own.__module__}
    return type(own.__name__, (own, CreatorOperator), members)
