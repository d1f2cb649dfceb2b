"""`ClassificationOperator`: trains a classifier with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.operators import options
from raysgd.operators.loaders import make_loaders, seeded
from raysgd.torch import TrainingOperator

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class ClassificationOperator(TrainingOperator):
    """Trains one model with cross-entropy; you give the model and the data.

    Override `build_model` and `build_data`, or pass functions that do the same as `config["model_creator"]` and
    `config["data_creator"]`. A sample is `(input, class index)`; the model returns one score for each class, without a
    softmax. `train` reports `train_loss`, `validate` reports `val_loss` and `val_accuracy`.

    Everything else is a rung of its own that may be overridden alone: `build_optimizer`, `build_criterion`,
    `build_scheduler`, and the ladder of `TrainingOperator` (`train_batch`, `forward`, `validate_batch`, ...). `setup`
    calls the `build_...` methods; leave it, or call `super().setup(config)`.

    Keys of the config, all optional; others are yours:

    * `lr`: learning rate, 0.001.
    * `optimizer`: "adam" (the default), "adamw", "rmsprop", "sgd", or a class called like those of `torch.optim`.
    * `weight_decay`: 0.
    * `raysgd.utils.BATCH_SIZE`: samples in a step of all workers together; or `batch_size`: of each worker, 32.
    * `seed`: fixes the first weights, the order of the data and everything random after them, for PyTorch's generators.
    * `model_creator`, `data_creator`: functions of the config.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from raysgd import TorchTrainer
        >>> class Signs(ClassificationOperator):
        ...     def build_model(self, config):
        ...         return torch.nn.Linear(1, 2)
        ...
        ...     def build_data(self, config):
        ...         x = torch.linspace(-1, 1, 100).reshape(-1, 1)
        ...         data = TensorDataset(x, (x[:, 0] > 0).long())
        ...         return data, data
        >>> config = {"lr": 0.1, "batch_size": 20, "seed": 0}
        >>> with TorchTrainer(training_operator_cls=Signs, config=config, use_local=True) as trainer:
        ...     for _ in range(5):
        ...         result = trainer.train()
        ...     trainer.validate()["val_accuracy"] > 0.9
        True

    Attributes:
        model: The registered model.
        optimizer: Its optimizer.
        criterion: The loss.
        scheduler: The learning-rate scheduler, only where `build_scheduler` returns one.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Callable[..., torch.Tensor]
    scheduler: Any

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        """Create the model. Override it, or pass `config["model_creator"]`.

        Raises:
            ValueError: There is neither.
        """
        return _created(self, "model", config)

    def build_data(self, config: dict[str, Any]) -> Any:
        """Create the data. Override it, or pass `config["data_creator"]`.

        Returns:
            `(train, validation)`: datasets, which are put into loaders, or loaders; None for what there is not.

        Raises:
            ValueError: There is neither.
        """
        return _created(self, "data", config)

    def build_optimizer(self, model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        """Create the optimizer that the config names."""
        make = _optimizer_class(config.get("optimizer", "adam"))
        lr = options.number(config, "lr", default=1e-3, positive=True)
        weight_decay = options.number(config, "weight_decay", default=0.0, positive=False)
        return make(model.parameters(), lr=lr, weight_decay=weight_decay)

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss, the mean over the samples."""
        return torch.nn.CrossEntropyLoss()

    def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        """Create a learning-rate scheduler, for a trainer with `scheduler_step_freq`; None for none."""
        return None

    def setup(self, config: dict[str, Any]) -> None:
        """Build everything and register it. If you override this, call it.

        Raises:
            ValueError: An option in the config makes no sense, or the model or the data is missing.
            TypeError: A `build_...` method returned something of the wrong kind.
        """
        seed, batch_size = options.seed(config), options.batch_size(config)
        with seeded(seed, self.world_rank):
            self._register_parts(config)
            train, validation = make_loaders(self.build_data(config), batch_size)
            self.register_data(train_loader=train, validation_loader=validation)

    def _register_parts(self, config: dict[str, Any]) -> None:
        model = self.build_model(config)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"`build_model` returned a `{type(model).__name__}`: return one `torch.nn.Module`. For several models "
                "subclass `TrainingOperator`."
            )
        optimizer = self.build_optimizer(model, config)
        scheduler = self.build_scheduler(optimizer, config)
        registered = self.register(
            models=model, optimizers=optimizer, criterion=self.build_criterion(config), schedulers=scheduler
        )
        self.model, self.optimizer, self.criterion = registered[:3]
        if scheduler is not None:
            self.scheduler = registered[3]


def _created(operator: ClassificationOperator, what: str, config: dict[str, Any]) -> Any:
    """What the creator function in the config returns."""
    creator = config.get(f"{what}_creator")
    if creator is None:
        raise ValueError(
            f"`{type(operator).__name__}` has no {what}: override `build_{what}(config)`, or pass a function of the "
            f"config as `config['{what}_creator']`."
        )
    if not callable(creator):
        raise ValueError(f"`config['{what}_creator']={creator!r}`: need a function that takes the config.")
    return creator(config)


def _optimizer_class(named: Any) -> Callable[..., torch.optim.Optimizer]:
    if isinstance(named, str) and named.lower() in OPTIMIZERS:
        return OPTIMIZERS[named.lower()]
    if callable(named):
        make: Callable[..., torch.optim.Optimizer] = named
        return make
    raise ValueError(
        f"`config['optimizer']={named!r}`: allowed are {', '.join(map(repr, OPTIMIZERS))} and classes that are called "
        "like those of `torch.optim`. For more options override `build_optimizer`."
    )
