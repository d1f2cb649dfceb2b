"""Base classes of the ready-made operators that train one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raysgd.operators import options
from raysgd.operators.loaders import make_loaders, seeded
from raysgd.torch import TrainingOperator

logger = logging.getLogger(__name__)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class SupervisedOperator(TrainingOperator):
    """Trains one model with one loss. Subclass a concrete operator, such as `ClassificationOperator`, not this class.

    `setup` calls the `build_...` methods below. Subclasses must override `build_model`, `build_data` and
    `build_criterion`. The concrete operators already override `build_criterion`.

    Attributes:
        model: The registered model.
        optimizer: The model's optimizer.
        criterion: The loss function, unless the model computes the loss.
        scheduler: The learning-rate scheduler, if `build_scheduler` returns one.
        ddp_args: Options for `DistributedDataParallel`.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Callable[..., torch.Tensor]
    scheduler: Any
    ddp_args: Mapping[str, Any] = {}

    _default_lr = 1e-3
    _default_optimizer = "adam"

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        """Create the model. Override this."""
        raise NotImplementedError(f"Override `{type(self).__name__}.build_model` to return the model.")

    def build_data(self, config: dict[str, Any]) -> Any:
        """Create the data. Override this.

        Returns:
            `(train, validation)`. Each is a dataset, a loader, a stream, or None. Datasets are wrapped in a loader.
        """
        raise NotImplementedError(f"Override `{type(self).__name__}.build_data` to return `(train, validation)`.")

    def build_collator(self, config: dict[str, Any]) -> Callable[[list[Any]], Any] | None:
        """Return a function that collates samples into a batch, or None for PyTorch's `default_collate`.

        The function is used for datasets, and for streams whose method `batch` was called without `collate`. If
        `build_data` returns loaders, they do not use the function.
        """
        return None

    def build_optimizer(self, model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        """Create the optimizer from `optimizer`, `lr` and `weight_decay` in the config."""
        if "learning_rate" in config and "lr" not in config:
            logger.warning(
                "`config['learning_rate']` has no effect, so the learning rate is %g: write `\"lr\"`", self._default_lr
            )
        make = _optimizer_class(config.get("optimizer", self._default_optimizer))
        lr = options.number(config, "lr", default=self._default_lr, positive=True)
        weight_decay = options.number(config, "weight_decay", default=0.0, positive=False)
        return make(self._parameters(model), lr=lr, weight_decay=weight_decay)

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor] | None:
        """Create a loss function that averages over the samples. Return None if the model computes the loss."""
        raise NotImplementedError(f"Override `{type(self).__name__}.build_criterion` to return the loss.")

    def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        """Create a learning-rate scheduler, or return None.

        If you return a scheduler, pass `scheduler_step_freq` to the trainer.
        """
        return None

    def setup(self, config: dict[str, Any]) -> None:
        """Build and register model, optimizer and data. If you override this, call `super().setup(config)`.

        Raises:
            ValueError: A config value is invalid.
            TypeError: A `build_...` method returned an object of the wrong type.
        """
        seed, batch_size = options.seed(config), options.batch_size(config)
        with seeded(seed, self.world_rank):
            self._register_parts(config)
            data, collator = self.build_data(config), self.build_collator(config)
            of_streams = None if collator is None else self._collator(collator)
            loaders = make_loaders(data, batch_size, self._collator(collator), of_streams)
            self.register_data(train_loader=loaders[0], validation_loader=loaders[1])

    def _collator(self, own: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
        """Return the `collate_fn` for the loaders that `setup` creates.

        Args:
            own: What `build_collator` returned.
        """
        return own

    def _prepare_model(self, model: torch.nn.Module) -> None:
        """Modify the model before its optimizer is created."""

    def _parameters(self, model: torch.nn.Module) -> Any:
        """Return the parameters to optimize."""
        return model.parameters()

    def _register_parts(self, config: dict[str, Any]) -> None:
        model = self.build_model(config)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"`build_model` returned a `{type(model).__name__}`: return one `torch.nn.Module`. For several models "
                "subclass `TrainingOperator`."
            )
        self._prepare_model(model)
        optimizer = self.build_optimizer(model, config)
        parts = {"criterion": self.build_criterion(config), "scheduler": self.build_scheduler(optimizer, config)}
        self.model, self.optimizer, *others = self.register(
            models=model,
            optimizers=optimizer,
            criterion=parts["criterion"],
            schedulers=parts["scheduler"],
            ddp_args=dict(self.ddp_args),
        )
        for name, part in zip([name for name, part in parts.items() if part is not None], others, strict=True):
            setattr(self, name, part)


class MeasuredOperator(SupervisedOperator):
    """Base class of operators that compute validation metrics with torchmetrics.

    At the end of a validation, the states of the workers' metrics are merged. The results are therefore the same as in
    a single process. An average of the workers' values would differ.
    """

    def build_metrics(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Create the validation metrics.

        Return a dict of metric names and torchmetrics objects. Subclasses must override this method.
        """
        raise NotImplementedError(f"Override `{type(self).__name__}.build_metrics` to return metrics.")

    def measured(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a batch's output and target into the arguments of `metric.update`."""
        return output, target

    def setup(self, config: dict[str, Any]) -> None:
        """Build and register model, optimizer, data and metrics. If you override this, call `super().setup(config)`."""
        super().setup(config)
        self.metrics = {name: metric.to(self.device) for name, metric in self.build_metrics(config).items()}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on all batches. Reset the metrics first, in case an earlier validation was interrupted."""
        for metric in self.metrics.values():
            metric.reset()
        return super().validate(val_iterator, info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch.

        Return the batch's `val_loss` and the torchmetrics objects, which accumulate over batches.
        """
        output, target, metrics = self.evaluate_batch(batch)
        measured = self.measured(output, target)
        for metric in self.metrics.values():
            metric.update(*measured)
        return {**metrics, **self.metrics, **self.measure_batch(output, target)}


def _optimizer_class(named: Any) -> Callable[..., torch.optim.Optimizer]:
    if isinstance(named, str) and named.lower() in OPTIMIZERS:
        return OPTIMIZERS[named.lower()]
    if callable(named):
        return named
    raise ValueError(
        f"`config['optimizer']={named!r}`: allowed are {', '.join(map(repr, OPTIMIZERS))} and classes that are called "
        "like those of `torch.optim`. For more options override `build_optimizer`."
    )
