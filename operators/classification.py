"""`ClassificationOperator`: trains a classifier with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.operators.supervised import SupervisedOperator


class ClassificationOperator(SupervisedOperator):
    """Trains a classifier with cross-entropy. You provide the model and the data.

    Override `build_model` and `build_data`. A sample is `(input, class index)`. The model returns one score for each
    class, without a softmax. `train` reports `train_loss`; `validate` reports `val_loss` and `val_accuracy`.

    You can also override `build_optimizer`, `build_criterion`, `build_scheduler`, and every method of
    `TrainingOperator` (`train_batch`, `forward`, `validate_batch`, ...), each on its own. `setup` calls the `build_...`
    methods. If you override it, call `super().setup(config)`.

    All config keys are optional, and you can add your own:

    * `lr`: Learning rate. Default: 0.001.
    * `optimizer`: "adam" (the default), "adamw", "rmsprop", "sgd", or a class that takes `lr` and `weight_decay`.
    * `weight_decay`: Weight decay. Default: 0.
    * `batch_size`: Samples in each step of one worker, or of all workers together with `split_batches=True`.
      Default: 32. Use the key `raysgd.utils.BATCH_SIZE` instead to always count all workers together.
    * `seed`: Seeds PyTorch's generators, for the initial weights, the order of the data and all later random numbers.

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
        scheduler: The learning-rate scheduler, if `build_scheduler` returns one.
    """

    def build_criterion(self, config: dict[str, Any]) -> Callable[..., torch.Tensor]:
        """Create the loss, a mean over the samples."""
        return torch.nn.CrossEntropyLoss()
