"""`ClassificationOperator`: trains a classifier with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.operators.supervised import SupervisedOperator


class ClassificationOperator(SupervisedOperator):
    """Trains one model with cross-entropy; you give the model and the data.

    Override `build_model` and `build_data`. A sample is `(input, class index)`; the model returns one score for each
    class, without a softmax. `train` reports `train_loss`, `validate` reports `val_loss` and `val_accuracy`.

    Everything else is a separate rung that may be overridden alone: `build_optimizer`, `build_criterion`,
    `build_scheduler`, and the ladder of `TrainingOperator` (`train_batch`, `forward`, `validate_batch`, ...). `setup`
    calls the `build_...` methods; leave it, or call `super().setup(config)`.

    Keys of the config, all optional; others are yours:

    * `lr`: learning rate, 0.001.
    * `optimizer`: "adam" (the default), "adamw", "rmsprop", "sgd", or a class called like those of `torch.optim`.
    * `weight_decay`: 0.
    * `batch_size`: samples in a step of each worker, or with `split_batches=True` of all workers together, 32. Instead,
      `raysgd.utils.BATCH_SIZE` counts all workers together in either case.
    * `seed`: fixes the first weights, the order of the data and everything random after them, for PyTorch's generators.

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
        optimizer: Its optimizer.
        criterion: The loss.
        scheduler: The learning-rate scheduler, only where `build_scheduler` returns one.
    """

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss, the mean over the samples."""
        return torch.nn.CrossEntropyLoss()
