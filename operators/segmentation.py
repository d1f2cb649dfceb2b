"""`SegmentationOperator`: trains a model that says of each pixel what is on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysgd._imports import require
from raysgd.operators import options
from raysgd.operators.supervised import MeasuredOperator
from raysgd.torch.data.batches import call, prediction
from raysgd.torch.objects.criteria import counts_labels


class SegmentationOperator(MeasuredOperator):
    """Trains one model with the cross-entropy of each pixel; you give the model and the data.

    Override `build_model` and `build_data`. A sample is `(image, class index of each pixel)`; the model returns
    scores of shape `(samples, classes, height, width)`, without a softmax.

    `train` reports `train_loss`. `validate` reports `val_loss`, `val_iou` (intersection over union for each class) and
    `val_miou`, their mean over the classes that occur. Pixels are counted over all batches and workers before anything
    is divided, so the values do not depend on how the images are divided. It needs the extra `metrics`.

    More rungs that may be overridden alone: `build_metrics`, `build_criterion`, `build_optimizer`, `build_scheduler`,
    and the ladder of `TrainingOperator`. `setup` calls the `build_...` methods; leave it, or call
    `super().setup(config)`.

    Keys of the config: those of `ClassificationOperator`, and

    * `num_classes`: 2.
    * `ignore_index`: the class of pixels that do not count. Loss and gradients are then means over the others, however
      many of them each worker has.

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
        """Create the loss, the mean over the pixels that count."""
        ignored = _ignored(config)
        return torch.nn.CrossEntropyLoss() if ignored is None else torch.nn.CrossEntropyLoss(ignore_index=ignored)

    def build_metrics(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Create the metrics of the validation: name -> a metric of torchmetrics."""
        torchmetrics = require("torchmetrics", extra="metrics", purpose=f"`{type(self).__name__}.build_metrics`")
        num_classes = options.count(config, "num_classes", default=2)
        of = {"task": "multiclass", "num_classes": num_classes, "ignore_index": _ignored(config)}
        return {
            "val_miou": torchmetrics.JaccardIndex(average="macro", **of),
            "val_iou": torchmetrics.JaccardIndex(average="none", **of),
        }

    def forward(self, features: Sequence[Any], target: Any) -> tuple[Any, ...]:
        """Return scores, the loss, and how many pixels it is the mean over, where some do not count.

        The losses of PyTorch count them by themselves, also by the weights of classes.
        """
        scores, ignored = prediction(call(self.model, features)), _ignored(self.config)
        is_counted = ignored is None or counts_labels(self.criterion)
        loss = self._raysgd.loss_calls.call(self.criterion, scores, target)
        return scores, loss, None if is_counted else target.ne(ignored).sum()

    def measured(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the class with the highest score at each pixel, and the true one."""
        return output.argmax(dim=1), target


def _ignored(config: Mapping[str, Any]) -> int | None:
    """The class of pixels that do not count."""
    value = config.get("ignore_index")
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"`config['ignore_index']={value!r}`: need the index of a class as an integer, such as 255.")
