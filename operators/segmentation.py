"""`SegmentationOperator`: trains a model that predicts a class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysgd.core.imports import require
from raysgd.operators import options
from raysgd.operators.supervised import MeasuredOperator
from raysgd.torch.data.batches import call, prediction
from raysgd.torch.objects.criteria import counts_labels


class SegmentationOperator(MeasuredOperator):
    """Trains a model with the cross-entropy of each pixel. You provide the model and the data.

    Override `build_model` and `build_data`. A sample is `(image, class index of each pixel)`. The model returns scores
    of shape `(samples, classes, height, width)`, without a softmax.

    `train` reports `train_loss`. `validate` reports `val_loss`, `val_iou` (intersection over union for each class) and
    `val_miou` (the mean over the classes that occur). Pixels are counted over all batches and workers first, so the
    values do not depend on which worker has which images. The operator needs the extra `metrics`.

    You can also override `build_metrics`, `build_criterion`, `build_optimizer`, `build_scheduler`, and every method of
    `TrainingOperator`, each on its own. `setup` calls the `build_...` methods. If you override it, call
    `super().setup(config)`.

    The config keys are those of `ClassificationOperator`, and:

    * `num_classes`: Number of classes. Default: 2.
    * `ignore_index`: Class of the pixels to ignore. Loss and gradients are then means over all other pixels, even if
      some workers have more of these than others.

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
        """Create the loss, a mean over the pixels that are not ignored."""
        ignored = _ignored(config)
        return torch.nn.CrossEntropyLoss() if ignored is None else torch.nn.CrossEntropyLoss(ignore_index=ignored)

    def build_metrics(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Create the validation metrics: a torchmetrics metric for each name."""
        torchmetrics = require("torchmetrics", extra="metrics", purpose=f"`{type(self).__name__}.build_metrics`")
        num_classes = options.count(config, "num_classes", default=2)
        of = {"task": "multiclass", "num_classes": num_classes, "ignore_index": _ignored(config)}
        return {
            "val_miou": torchmetrics.JaccardIndex(average="macro", **of),
            "val_iou": torchmetrics.JaccardIndex(average="none", **of),
        }

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Return the scores, the loss, and the number of pixels that the loss is a mean over.

        The number is None if no pixels are ignored. It is also None for PyTorch's own losses: for these, the training
        step finds the number itself, with the weights of the classes.
        """
        scores, ignored = prediction(call(self.model, features)), _ignored(self.config)
        is_counted = ignored is None or counts_labels(self.criterion)
        loss = self._raysgd.loss_calls.call(self.criterion, scores, target)
        return scores, loss, None if is_counted else target.ne(ignored).sum()

    def measured(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the class with the highest score at each pixel, and the true one."""
        return output.argmax(dim=1), target


def _ignored(config: Mapping[str, Any]) -> int | None:
    """Return the class of the pixels to ignore; None if all count."""
    value = config.get("ignore_index")
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"`config['ignore_index']={value!r}`: need the index of a class as an integer, such as 255.")
