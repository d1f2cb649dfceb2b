"""The settings of a TensorFlow replica, and the internal attributes of its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.arguments import check_seed
from raysgd.core.arrays.user_data import RayLoader
from raysgd.core.engine.shared.types import World
from raysgd.streams.source import StreamData
from raysgd.tf.data.sources import inputs
from raysgd.tf.fit import FitStream
from raysgd.tf.objects.datasets import Sharding, num_samples
from raysgd.tf.parallel.global_metrics import merged
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.parallel.step import TFStep
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.operator import Internals, required


@dataclass(frozen=True)
class TFSettings(ReplicaSettings):
    """The settings from which every replica is created. The docstring of `TFTrainer` explains each field.

    Attributes:
        num_workers: The intended number of workers. Default: the number of workers when the replica is created.

    Raises:
        ValueError: A value is invalid.
    """

    seed: int
    verbose: bool | int | str = False
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.verbose, str | bytes) and self.verbose != "auto":
            raise ValueError(f'`verbose={self.verbose!r}`: allowed are True, False, 0, 1, 2 and "auto".')
        check_seed(self.seed)


@dataclass(frozen=True)
class OperatorContext:
    """The worker's settings, its rank, the number of ranks, and its synchronizer, for use by the operator."""

    settings: TFSettings
    world: World
    synchronizer: Synchronizer = field(default_factory=lambda: Synchronizer(World(rank=0, size=1)))


@dataclass(frozen=True)
class RegisteredObjects:
    """The objects that the operator has passed to `register`. Before that call, there are none."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    loss: Any = None
    metrics: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class RegisteredData:
    """The datasets that the operator has passed to `register_data`.

    Attributes:
        train_dataset: The training dataset, before raysgd shards it. For Ray Data, it has only this worker's batches.
        validation_dataset: The validation dataset, as for `train_dataset`.
        sharding: "worker" if a batch is for one worker, "global" if it is a global batch.
        ray_loaders: Loaders for datasets of Ray Data, under the keys "train" and "validation".
        streams: Registered streams, under the keys "train" and "validation".
    """

    train_dataset: Any = None
    validation_dataset: Any = None
    sharding: Sharding = "worker"
    ray_loaders: Mapping[str, RayLoader] = field(default_factory=dict)
    streams: Mapping[str, StreamData] = field(default_factory=dict)


class TFInternals(Internals):
    """The internal attributes of a TensorFlow operator, kept in this object to avoid clashes with users' attributes.

    Attributes:
        registered: The registered models, optimizers, loss and metrics.
        data: The registered datasets.
        train_function: The compiled `train_step`, or None until it is first needed.
        test_function: The compiled `test_step`, or None until it is first needed.
        chosen: The learning rates that `setup` chose. None for an optimizer that follows a schedule or whose rate
            cannot be set.
        step: The current step: that of training, or that of the running validation.
        num_left_out: Number of steps that `train_epoch` must still add to `global_step`. Only other ranks had samples
            in these steps.
        fit: Holds the position of Keras's `fit`, for operators created from creator functions.
    """

    context: OperatorContext
    fit: FitStream

    def __init__(self, operator: Any, config: dict[str, Any], context: OperatorContext) -> None:
        super().__init__(config, context)
        self._operator = operator
        self.registered, self.data = RegisteredObjects(), RegisteredData()
        self.train_function: Any = None
        self.test_function: Any = None
        self._predict_function: Any = None
        self.num_left_out = 0
        self.step = context.synchronizer.step
        self.chosen: list[float | None] = []
        self._trained: tuple[int, tuple[int, ...]] | None = None  # ids of optimizer and variables in compiled steps

    @property
    def leg(self) -> TFStep:
        return self.step

    def compiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a method such as `train_step` to a graph, or return it unchanged if the operator runs eagerly."""
        import tensorflow as tf

        return method if self._operator.run_eagerly else tf.function(method, reduce_retracing=True)

    def forget_stale_steps(self) -> None:
        """Discard the compiled steps if the optimizer or the set of trainable variables has changed.

        The all-reduces that were recorded in these steps are discarded, too. The next call traces the steps again.
        """
        models = self.registered.models
        trained = [id(variable) for model in models if model.built for variable in model.trainable_variables]
        kind = (id(getattr(self._operator, "optimizer", None)), tuple(trained))
        if kind != self._trained and self._trained is not None:
            self.train_function = self.test_function = self._predict_function = None
            self.context.synchronizer.step.usual.clear()
        self._trained = kind

    def begin_step(self) -> None:
        """Prepare for a step, in which `refuse_unscaled` checks that the loss is scaled if this is necessary."""
        if self.context.synchronizer.losses is not None:
            self.context.synchronizer.losses.is_scaled = False

    def mean_loss(self, loss: Any, target: Any, output: Any, weight: Any) -> Any:
        """Return a batch's loss as a scalar, scaled for the sample-weighted average over ranks.

        This average then equals the loss that a single process would compute on the global batch.
        """
        import tensorflow as tf

        losses = self.context.synchronizer.losses
        if losses is not None:
            return losses.mean(loss, target, output, weight)
        return tf.reduce_mean(loss(target, output) if weight is None else loss(target, output, weight))

    def predict(self, batch: Any, info: Mapping[str, Any]) -> Any:
        """Return the model's output for a batch. This is the default `predict_batch`."""
        self.forget_stale_steps()
        if self._predict_function is None:
            model = required(self._operator, "model")
            self._predict_function = self.compiled(lambda features: model(features, training=False))
        with self._operator.timers.record("predict_fwd"):
            return self._predict_function(inputs(batch, info.get(HAS_TARGET, False)))

    def num_samples(self, batch: Any) -> int:
        """Return the number of this rank's samples in a batch. A batch of padding has 0 samples."""
        known = self.context.synchronizer.step.num_samples
        return int(num_samples(batch)) if known is None else known

    def reset_metrics(self) -> None:
        """Reset the registered metrics."""
        for metric in self.registered.metrics:
            metric.reset_state()

    def metric_results(self, prefix: str) -> dict[str, float]:
        """Return the registered metrics' results, merged over all workers."""
        metrics = self.registered.metrics
        with merged(self.context.synchronizer.group, metrics):
            return {f"{prefix}{metric.name}": float(metric.result()) for metric in metrics}

    def values_and_weight(self, metrics: Mapping[str, Any], method: str) -> tuple[dict[str, Any], Any]:
        values, weight = super().values_and_weight(metrics, method)
        return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in values.items()}, weight
