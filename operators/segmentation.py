"""`SegmentationOperator`: trains a model that predicts a class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysgd.operators import options
from raysgd.operators.supervised import MeasuredOperator
from raysgd.torch.building_blocks import counts_labels, prediction, require


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
