"""Operators for users' tests. They call a function from the config in each epoch, or report scores from the config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from raysgd.trainer.worker.operator import BaseOperator
from raysgd.utils import NUM_SAMPLES

Operator = TypeVar("Operator", bound=BaseOperator)


def get_test_operator(operator_cls: type[Operator]) -> type[Operator]:
    """Return a subclass whose `train_epoch` and `validate` call `config["custom_func"](operator, iterator, info)`.

    If the config has no such function, both methods return `{"done": 1}`.
    """

    class _TestOperator(operator_cls):  # type: ignore[valid-type, misc]
        resumes_epochs = False  # the user's function may not support continuing in the middle of an epoch

        def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any], **kwargs: Any) -> Any:
            function = self.config.get("custom_func")
            return function(self, iterator, info) if callable(function) else {"done": 1}

        def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> Any:
            return self.train_epoch(val_iterator, info)

    return _TestOperator


def get_test_metrics_operator(operator_cls: type[Operator]) -> type[Operator]:
    """Return a subclass that reports a score from the config for each batch, as the metric `config["key"]`.

    The scores of training batches are in the list `config["scores"]`, those of validation batches in
    `config["val_scores"]`. The metric is the score divided by the number of samples in the batch.
    """

    class _TestMetricsOperator(operator_cls):  # type: ignore[valid-type, misc]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._train_scores = list(config["scores"])
            self._val_scores = list(config["val_scores"])
            self.key = config["key"]

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics = super().train_batch(batch, batch_info)
            return {**metrics, self.key: self._train_scores.pop(0) / metrics[NUM_SAMPLES]}

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics = super().validate_batch(batch, batch_info)
            return {**metrics, self.key: self._val_scores.pop(0) / metrics[NUM_SAMPLES]}

    return _TestMetricsOperator
