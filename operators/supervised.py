"""The ready-made operators that train one model: for classes, continuous values and pixels, and their base classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from raysgd.operators import options
from raysgd.operators.loaders import Collator, ReadyMadeOperator
from raysgd.torch.building_blocks import call_model, counts_labels, prediction, require

logger = logging.getLogger(__name__)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class SupervisedOperator(ReadyMadeOperator):
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

    def _collators(self, config: dict[str, Any]) -> tuple[Collator | None, Collator | None]:
        own = self.build_collator(config)
        return own, own

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


class ClassificationOperator(SupervisedOperator):
    """Trains a classifier with cross-entropy. You provide the model and the data.

    Override `build_model` and `build_data`. A sample is `(input, class index)`. The model returns one logit per class.
    `train` reports `train_loss`; `validate` reports `val_loss` and `val_accuracy`.

    You can also override `build_optimizer`, `build_criterion`, `build_scheduler`, and any method of `TrainingOperator`,
    such as `train_batch`, `forward` and `validate_batch`. `setup` calls the `build_...` methods. If you override
    `setup`, call `super().setup(config)`.

    All config keys are optional, and you can add your own:

    * `lr`: Learning rate. Default: 0.001.
    * `optimizer`: "adam" (the default), "adamw", "rmsprop", "sgd", or a class that takes `lr` and `weight_decay`.
    * `weight_decay`: Weight decay. Default: 0.
    * `batch_size`: Samples per step and worker. With `split_batches=True`, samples per step over all workers.
      Default: 32. To set the global batch size in either case, use the key `raysgd.utils.BATCH_SIZE` instead.
    * `seed`: Seed for PyTorch's generators, which determine the initial weights, the data order and all later random
      numbers.

    Examples:
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
        >>> options = {"config": {"lr": 0.1, "batch_size": 20, "seed": 0}, "split_batches": True}
        >>> with TorchTrainer(training_operator_cls=Signs, **options, use_local=True) as trainer:
        ...     for _ in range(5):
        ...         result = trainer.train()
        ...     trainer.validate()["val_accuracy"] > 0.9
        True

    Attributes:
        model: The registered model.
        optimizer: The model's optimizer.
        criterion: The loss function that `build_criterion` returned.
        scheduler: The learning-rate scheduler, if `build_scheduler` returns one.
    """

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss function: cross-entropy, averaged over a batch's samples."""
        return torch.nn.CrossEntropyLoss()


class RegressionOperator(MeasuredOperator):
    """Trains a model with the mean squared error. You provide the model and the data.

    Override `build_model` and `build_data`. A sample is `(input, target)`. The model returns predictions with the same
    shape as the targets. If the predictions have an additional last dimension of size 1, this dimension is squeezed.

    `train` reports `train_loss`. `validate` reports `val_loss`, `val_mae` (mean absolute error) and `val_r2` (fraction
    of variance explained). The values equal what a single process would compute from the samples of all workers.
    The operator needs the extra `metrics`.

    You can also override `build_metrics`, `build_criterion`, `build_optimizer`, `build_scheduler`, and any method of
    `TrainingOperator`. `setup` calls the `build_...` methods. If you override `setup`, call `super().setup(config)`.

    The config keys are the same as for `ClassificationOperator`.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from raysgd import TorchTrainer
        >>> class Line(RegressionOperator):
        ...     def build_model(self, config):
        ...         return torch.nn.Linear(1, 1)
        ...
        ...     def build_data(self, config):
        ...         x = torch.linspace(-1, 1, 100).reshape(-1, 1)
        ...         data = TensorDataset(x, 2 * x[:, 0])
        ...         return data, data
        >>> options = {"config": {"lr": 0.1, "batch_size": 20, "seed": 0}, "split_batches": True}
        >>> with TorchTrainer(training_operator_cls=Line, **options, use_local=True) as trainer:
        ...     for _ in range(10):
        ...         result = trainer.train()
        ...     trainer.validate()["val_r2"] > 0.9
        True
    """

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss function: the squared error, averaged over a batch's predictions."""
        return torch.nn.MSELoss()

    def build_metrics(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Create the metrics that `validate` computes. Return a dict of metric names and torchmetrics objects."""
        torchmetrics = require("torchmetrics", extra="metrics", purpose=f"`{type(self).__name__}.build_metrics`")
        return {
            "val_mae": torchmetrics.MeanAbsoluteError().set_dtype(torch.float64),
            "val_r2": torchmetrics.R2Score().set_dtype(torch.float64),
        }

    def measured(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a batch's predictions and targets to float64 before they update the metrics.

        The R-squared metric subtracts large sums of squares, which loses too much precision in float32.
        """
        return output.double(), target.double()

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Return the predictions, squeezed to the targets' shape if necessary, and the loss.

        Raises:
            ValueError: The predictions and the targets have different shapes.
        """
        predicted = prediction(call_model(self.model, features))
        if predicted.ndim == target.ndim + 1 and predicted.shape[-1] == 1:
            predicted = predicted.squeeze(-1)
        if predicted.shape != target.shape:
            raise ValueError(
                f"The model returned predictions of shape {tuple(predicted.shape)} for targets of shape "
                f"{tuple(target.shape)}: return one prediction for each target, or override `forward`."
            )
        return predicted, self.criterion(predicted, target)


class SegmentationOperator(MeasuredOperator):
    """Trains a model with per-pixel cross-entropy. You provide the model and the data.

    Override `build_model` and `build_data`. A sample is `(image, class index of each pixel)`. The model returns logits
    of shape `(samples, classes, height, width)`.

    `train` reports `train_loss`. `validate` reports `val_loss`, `val_iou` (intersection over union per class) and
    `val_miou` (the mean over the classes that occur). The metrics are computed from pixel counts summed over all
    batches and workers, so they do not depend on how the images are sharded. The operator needs the extra `metrics`.

    You can also override `build_metrics`, `build_criterion`, `build_optimizer`, `build_scheduler`, and any method of
    `TrainingOperator`. `setup` calls the `build_...` methods. If you override `setup`, call `super().setup(config)`.

    The config keys are the same as for `ClassificationOperator`, plus:

    * `num_classes`: Number of classes. Default: 2.
    * `ignore_index`: Class index of pixels to ignore. The loss and the gradients are means over the remaining pixels
      of all workers, even if their number differs between workers.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from raysgd import TorchTrainer
        >>> class Bright(SegmentationOperator):
        ...     def build_model(self, config):
        ...         return torch.nn.Conv2d(1, 2, kernel_size=1)
        ...
        ...     def build_data(self, config):
        ...         images = torch.linspace(-1, 1, 320).reshape(20, 1, 4, 4)
        ...         data = TensorDataset(images, (images[:, 0] > 0).long())
        ...         return data, data
        >>> options = {"config": {"lr": 0.1, "batch_size": 5, "seed": 0}, "split_batches": True}
        >>> with TorchTrainer(training_operator_cls=Bright, **options, use_local=True) as trainer:
        ...     for _ in range(10):
        ...         result = trainer.train()
        ...     trainer.validate()["val_miou"] > 0.9
        True
    """

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss function: cross-entropy, averaged over the pixels that are not ignored."""
        ignored = _ignored(config)
        return torch.nn.CrossEntropyLoss() if ignored is None else torch.nn.CrossEntropyLoss(ignore_index=ignored)

    def build_metrics(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Create the metrics that `validate` computes. Return a dict of metric names and torchmetrics objects."""
        torchmetrics = require("torchmetrics", extra="metrics", purpose=f"`{type(self).__name__}.build_metrics`")
        num_classes = options.count(config, "num_classes", default=2)
        of = {"task": "multiclass", "num_classes": num_classes, "ignore_index": _ignored(config)}
        return {
            "val_miou": torchmetrics.JaccardIndex(average="macro", **of),
            "val_iou": torchmetrics.JaccardIndex(average="none", **of),
        }

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Return the logits, the loss, and the number of pixels over which the loss averages.

        The number of pixels is None if the config has no `ignore_index`. It is also None if the criterion is or
        contains a PyTorch loss that averages over labels, such as `CrossEntropyLoss`. The training step then computes
        the number itself and takes class weights into account.
        """
        output, loss = super().forward(features, target)
        ignored = _ignored(self.config)
        is_counted = ignored is None or counts_labels(self.criterion)
        return prediction(output), loss, None if is_counted else target.ne(ignored).sum()

    def measured(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted and the true class of each pixel."""
        return output.argmax(dim=1), target


def _ignored(config: Mapping[str, Any]) -> int | None:
    """Return the class index of pixels to ignore, or None if no pixels are ignored."""
    value = config.get("ignore_index")
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"`config['ignore_index']={value!r}`: need the index of a class as an integer, such as 255.")
