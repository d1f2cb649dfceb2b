"""`RegressionOperator`: trains a model that predicts continuous values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raysgd.operators.supervised import MeasuredOperator
from raysgd.torch.building_blocks import call_model, prediction, require


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
