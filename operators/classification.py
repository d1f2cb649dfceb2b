"""`ClassificationOperator`: trains a classifier with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.operators.supervised import SupervisedOperator


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
