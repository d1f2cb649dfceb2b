"""`TrainingOperator` for TensorFlow: the class that users subclass to define their training.

The methods form a ladder, in which each method, called a rung, does one thing and calls the next rung:

    train_epoch -> train_batch -> train_step -> forward, optimizer_step
    validate    -> validate_batch -> test_step -> forward

`train_step`, `test_step` and the rungs that they call are compiled into a graph. Override the lowest rung that lets you
make your change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.arguments import answer_mistakes, check_seed
from raysgd.core.arrays.division import BETWEEN_BATCHES, BatchPlan, Division
from raysgd.core.arrays.user_data import RayLoader, ray_batches
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.streams.source import StreamData, stream_data
from raysgd.streams.stream import Stream
from raysgd.tf.data.sources import as_batch, dataset_of, dataset_over, inputs
from raysgd.tf.fit import FitStream
from raysgd.tf.objects import registration
from raysgd.tf.objects.datasets import Sharding, check_dataset, num_samples, zeros
from raysgd.tf.parallel.global_metrics import check_aggregation, merged
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.parallel.step import TFStep
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.messages.epochs import bind_batch_info
from raysgd.trainer.messages.prediction import HAS_TARGET
from raysgd.trainer.worker.operator import NUM_STEPS as NUM_STEPS  # programs import the name from this module
from raysgd.trainer.worker.operator import (
    BaseOperator,
    Internals,
    ReadOnlyView,
    RegisteredParts,
    made_by_hand,
    required,
    rung,
)
from raysgd.utils import BATCH_WEIGHT, NUM_SAMPLES

_REGISTER = "Pass what you make to `self.register` in `setup`, and keep what that returns."


class TrainingOperator(BaseOperator):
    """Base class for the definition of a model's training. Every worker has one instance.

    Override `setup` to create models, optimizers and datasets, and pass them to `register` and `register_data`. If
    there is one `self.model`, one `self.optimizer` and one `self.loss`, nothing else is required. Do not override
    `__init__`.

    Examples:
        >>> class Line(TrainingOperator):
        ...     def setup(self, config):
        ...         import tensorflow as tf
        ...
        ...         model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
        ...         self.model, self.optimizer, self.loss = self.register(
        ...             models=model,
        ...             optimizers=tf.keras.optimizers.SGD(config["lr"]),
        ...             loss=tf.keras.losses.MeanSquaredError(),
        ...         )
        ...         x = tf.reshape(tf.linspace(0.0, 1.0, 64), [-1, 1])
        ...         self.register_data(train_dataset=tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(8))
        >>> from raysgd import TFTrainer
        >>> trainer = TFTrainer(training_operator_cls=Line, config={"lr": 0.1}, num_workers=2)  # doctest: +SKIP
        >>> trainer.train()["num_samples"]  # doctest: +SKIP
        64

    Attributes:
        world_size: Number of workers.
        timers: Timers of the current call. `with self.timers.record("name"):` measures a block of code. With
            `profile=True`, the call's result contains the measured times.
        global_step: Number of global batches that the default `train_epoch` has trained on. A global batch is what all
            workers train on in one step, so steps in which this worker had no samples count, too.
        run_eagerly: Whether to run `train_step` and `test_step` eagerly instead of as a graph. Set it to True in
            `setup` to use a debugger. Default: False.
        resumes_epochs: Whether an epoch may continue after workers were lost or added, by calling `train_epoch` again
            with the remaining batches. Default: True unless you override `train_epoch`. If you override it, set this to
            True only if your `train_epoch` keeps no state between batches beyond what raysgd or `state_dict` saves.
            With False, every failure restarts from the last snapshot.
        warms_up: Whether a new worker calls `train_batch` twice on zeros, so that it is fast when it joins. Afterwards,
            the registered objects receive another worker's state. If `train_batch` has other side effects, check
            `batch_info.get("warm_up")`, or set this to False.
        compares_ranks: Whether training calls raise `RanksDifferError` if the workers' weights differ. To compare only
            some models, set this to a tuple of those models in `setup`.
    """

    run_eagerly = False

    _raysgd: TFInternals
    _models, _optimizers = (
        ReadOnlyView("registered.models", _REGISTER),
        ReadOnlyView("registered.optimizers", _REGISTER),
    )

    def __init__(self, config: dict[str, Any] | None = None, context: OperatorContext | None = None) -> None:
        if config is None or context is None:
            raise made_by_hand(type(self))
        super().__init__(config, TFInternals(self, config, context))

    @rung
    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on all batches of `iterator` and return the averaged metrics.

        Args:
            iterator: This worker's batches. Train on each batch before you draw the next.
            info: The `info` that was passed to the trainer's `train`, with additional entries from raysgd.
            num_steps: The `num_steps` that was passed to the trainer's `train`.
            epoch_idx: Index of the epoch, from 0.

        Returns:
            `batch_count`, `num_samples`, the mean and `last_<metric>` of each metric of `train_batch`, and
            `train_<name>` for each registered Keras metric.
        """
        internals = self._raysgd
        internals.forget_stale_steps()  # a user's override may have changed models or optimizers before calling this
        info = {**internals.info_of_call(num_steps, epoch_idx), **(info or {})}
        meters = internals.take_meters()
        if not meters.num_batches:
            internals.reset_metrics()
        train_batch = bind_batch_info(self.train_batch)
        batch_idx = meters.num_batches
        for batch in iterator:
            batch_idx += self._count_left_out()
            where = {"batch_idx": batch_idx, "global_step": self.global_step}
            meters.update(*internals.values_and_weight(train_batch(batch, {**where, **info}), "train_batch"))
            batch_idx, self.global_step = batch_idx + 1, self.global_step + 1
        self._count_left_out()
        summary = meters.summary()
        summary.update(internals.metric_results("train_"))
        return summary

    def _count_left_out(self) -> int:
        """Add to `global_step` the steps in which only other workers had samples, unless they were added before.

        Returns:
            The number of added steps.
        """
        internals = self._raysgd
        number, internals.num_left_out = internals.num_left_out, 0
        self.global_step += number
        return number

    @rung
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Take one optimizer step on one batch.

        Args:
            batch: `(features, target)` or `(features, target, sample_weight)`, as for `fit`.
            batch_info: A dict with `batch_idx`, `global_step` and the entries of `info`. While a new worker warms up,
                the dict also has `warm_up=True`, and the step does not count.

        Returns:
            The batch's metrics: numbers or one-element tensors. `num_samples` is their weight in the average.
        """
        internals = self._raysgd
        if internals.train_function is None:
            internals.train_function = internals.compiled(self.train_step)
        internals.begin_step()
        with self.timers.record("train_step"):
            metrics = internals.train_function(batch)
        return {**metrics, NUM_SAMPLES: internals.num_samples(batch)}

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Compute the gradients of a batch's loss and call `optimizer_step`. Runs as a graph.

        Returns:
            The batch's metrics, as tensors.
        """
        import tensorflow as tf

        model, optimizer = required(self, "model"), required(self, "optimizer")
        features, target, sample_weight = unpack(batch)
        with tf.GradientTape() as tape:
            output, loss, weight = _three(self.forward(features, target, sample_weight, training=True))
            scaled = _scaled(optimizer, loss if weight is None else self.weighted_loss(loss, weight))
        gradients = _unscaled(optimizer, tape.gradient(scaled, model.trainable_variables))
        self.optimizer_step(gradients)
        self.update_metrics(target, output, sample_weight)
        return {"train_loss": loss, **_as_metric(weight)}

    def forward(self, features: Any, target: Any, sample_weight: Any = None, training: bool = False) -> tuple[Any, ...]:
        """Return the model's output for a batch, and the mean loss over samples. Called in training and validation.

        By default, the loss includes `model.losses`, such as regularization terms. If the loss is a mean over other
        units, such as tokens, return the number of units as a third value. Gradients and metrics are then averaged over
        all workers with this weight.
        """
        import tensorflow as tf

        model = required(self, "model")
        output = model(features, training=training)
        loss = self._raysgd.mean_loss(required(self, "loss"), target, output, sample_weight)
        if model.losses:
            loss += tf.cast(tf.add_n([tf.cast(extra, loss.dtype) for extra in model.losses]), loss.dtype)
        return output, loss

    def optimizer_step(self, gradients: Sequence[Any]) -> None:
        """Apply the gradients with `self.optimizer`.

        The optimizer first averages the gradients over all workers, weighted by samples.
        """
        optimizer = required(self, "optimizer")
        self._raysgd.context.synchronizer.require_watched(optimizer)
        variables = required(self, "model").trainable_variables
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def update_metrics(self, target: Any, output: Any, sample_weight: Any = None) -> None:
        """Update all registered Keras metrics with a batch."""
        for metric in self._raysgd.registered.metrics:
            metric.update_state(target, output, sample_weight=sample_weight)

    @rung
    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on all batches of `val_iterator` and return the averaged metrics.

        Ranks may have different numbers of batches, so the loop must not call collectives.
        """
        internals = self._raysgd
        internals.reset_metrics()
        summary = internals.validated(val_iterator, info)
        summary.update(internals.metric_results("val_"))
        return summary

    @rung
    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch. Return `val_loss`, and `num_samples` as its weight in the average over batches.

        For other metrics, pass Keras metrics to `register`.
        """
        internals = self._raysgd
        if internals.test_function is None:
            internals.test_function = internals.compiled(self.test_step)
        internals.begin_step()
        with self.timers.record("test_step"):
            metrics = internals.test_function(batch)
        return {**metrics, NUM_SAMPLES: internals.num_samples(batch)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate a batch of validation data and return its metrics as tensors. Runs as a graph."""
        features, target, sample_weight = unpack(batch)
        output, loss, weight = _three(self.forward(features, target, sample_weight, training=False))
        losses = self._raysgd.context.synchronizer.losses
        if losses is not None and weight is None:
            losses.refuse_unscaled()
        self.update_metrics(target, output, sample_weight)
        return {"val_loss": loss, **_as_metric(weight)}

    @answer_mistakes(
        "`self.model, self.optimizer, self.loss = self.register(models=model, optimizers=optimizer, loss=loss)`; "
        "datasets go into `self.register_data(train_dataset=..., validation_dataset=...)`"
    )
    def register(self, *, models: Any, optimizers: Any = None, loss: Any = None, metrics: Any = None) -> Any:
        """Register models, optimizers, loss and metrics.

        Afterwards, the optimizers average gradients across all workers, wherever you use them.

        Args:
            models: A Keras model, or a list or tuple of models.
            optimizers: A Keras optimizer, or a list or tuple of optimizers. Default: the optimizers that the models are
                compiled with.
            loss: A Keras loss, or a function of target and output that returns one value per sample. The library
                averages over the samples.
            metrics: A Keras metric, or a list or tuple of metrics. Their state is merged over the workers.

        Returns:
            `(models, optimizers[, loss][, metrics])`, with models, optimizers and metrics in their original containers.
            If a model computes in float16, the passed optimizers are wrapped in a `LossScaleOptimizer`.

        Raises:
            InvalidRegistrationError: An object has the wrong type.
            IncompatibleModelError: Keras does not run on TensorFlow, `optimizers` is omitted but a model is not
                compiled, or a metric cannot be merged over workers.
            TypeError: A keyword is unknown.
        """
        parts = [registration.models_of(models)]
        if optimizers is None:
            for model in parts[0].items:
                registration.require_compiled(model, "`register` without `optimizers`: the operator")
            parts.append(RegisteredParts([model.optimizer for model in parts[0].items], parts[0].container))
        else:
            registered = registration.optimizers_of(optimizers)
            scaled = [registration.with_loss_scale(optimizer, parts[0].items) for optimizer in registered.items]
            parts.append(RegisteredParts(scaled, registered.container))
        if loss is not None and not callable(loss):
            raise InvalidRegistrationError(
                f"`register(loss={loss!r})`: pass a Keras loss, or a function of target and output."
            )
        metric_parts = None if metrics is None else registration.metrics_of(metrics)
        metric_items = [] if metric_parts is None else metric_parts.items
        synchronizer = self._raysgd.context.synchronizer
        if synchronizer.watches:
            check_aggregation(metric_items)
        self._raysgd.registered = RegisteredObjects(parts[0].items, parts[1].items, loss, metric_items)
        if synchronizer.losses is not None:
            synchronizer.losses.registered = loss
        for optimizer in parts[1].items:
            synchronizer.watch(optimizer)
        result = [each.mirror(each.items) for each in parts]
        result += [] if loss is None else [loss]
        result += [] if metric_parts is None else [metric_parts.mirror(metric_items)]
        return tuple(result)

    @answer_mistakes("`self.register_data(train_dataset=dataset, validation_dataset=another)`")
    def register_data(
        self, *, train_dataset: Any = None, validation_dataset: Any = None, sharding: Sharding | None = None
    ) -> None:
        """Register the datasets. raysgd shards them over the workers.

        Args:
            train_dataset: One of the following: a `tf.data.Dataset` of batches, which must be the same on every worker;
                a Ray Data dataset, or `raysgd.data.RayBatches` of such a dataset; or, with `split_batches=True`, a
                stream.
            validation_dataset: The validation dataset, of one of the same types.
            sharding: `"worker"` if a batch of a dataset is for one worker, or `"global"` if it is a global batch, as
                with TensorFlow's strategies. Default: "global" with `split_batches=True`, otherwise "worker". A dataset
                whose auto-shard policy is OFF is not sharded.

        Raises:
            TypeError: A dataset has the wrong type.
            ValueError: The sharding is unknown or contradicts `split_batches=True`, or a dataset's elements are not
                batches.
            InvalidRegistrationError: A stream was passed, but the global batch size is not constant.
        """
        if sharding not in ("worker", "global", None):
            raise ValueError(f'`sharding={sharding!r}`: allowed are "worker" and "global".')
        is_split = self._raysgd.context.settings.batch_options.split_batches
        if is_split and sharding == "worker":
            raise ValueError(
                '`register_data(sharding="worker")` with `split_batches=True`: each batch is divided over the workers. '
                "Write `register_data(train_dataset=...)`, or omit `split_batches` in the trainer."
            )
        sharding = sharding or ("global" if is_split else "worker")
        by_name = {"train": train_dataset, "validation": validation_dataset}
        loaders: dict[str, RayLoader] = {}
        streams: dict[str, StreamData] = {}
        for name, dataset in by_name.items():
            batches = ray_batches(dataset)
            if batches is not None:
                loaders[name] = RayLoader(batches.sized(self.config), self._raysgd.context.world, as_batch)
                by_name[name] = dataset_over(loaders[name])
            elif isinstance(dataset, Stream):
                reason = self._raysgd.context.settings.obstacle_of_streams
                if reason is not None:
                    raise InvalidRegistrationError(f"`register_data({name}_dataset=...)` got {reason}")
                streams[name] = stream_data(dataset, name, Division, self._raysgd.context.world.size)
                by_name[name] = dataset_of(dataset)
            elif dataset is not None:
                check_dataset(f"{name}_dataset", dataset)
        self._raysgd.data = RegisteredData(by_name["train"], by_name["validation"], sharding, loaders, streams)

    def weighted_loss(self, loss: Any, weight: Any) -> Any:
        """Scale a loss that is a mean over `weight` units, such as tokens, so that gradients are averaged by units.

        Call this method in your own `train_step`, on all workers, and compute gradients of the scaled loss that it
        returns. Report the unscaled `loss` as a metric, and the weight under `raysgd.utils.BATCH_WEIGHT`.
        """
        losses = self._raysgd.context.synchronizer.losses
        return loss if losses is None else losses.weighted(loss, weight)

    @property
    def train_dataset(self) -> Any:
        """The registered training dataset, unsharded. Of a Ray Data dataset, it has this worker's batches."""
        return self._raysgd.data.train_dataset

    @property
    def validation_dataset(self) -> Any:
        """The registered validation dataset, unsharded. Of a Ray Data dataset, it has this worker's batches."""
        return self._raysgd.data.validation_dataset

    def warm_up(self) -> None:
        """Train on batches of zeros, to do one-time work such as tracing before the worker joins a group."""
        internals = self._raysgd
        step = internals.context.synchronizer.step
        info = {"batch_idx": 0, "global_step": 0, "warm_up": True, **internals.info_of_call(None, 0)}
        internals.train_function = internals.compiled(self.train_step)  # training reuses the compiled step
        for number in (1, 2):  # with the second batch size, TensorFlow traces the step for all batch sizes
            step.plan = BatchPlan(number)
            batch = zeros(internals.data.train_dataset.element_spec, number)
            bind_batch_info(self.train_batch)(batch, info)
        step.plan = BETWEEN_BATCHES
        internals.reset_metrics()


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Split a batch into features, target and sample weights, as Keras's `fit` does. Missing parts are None."""
    if not isinstance(batch, list | tuple):
        return batch, None, None
    features, target, sample_weight = (*batch, None, None)[:3]
    return features, target, sample_weight


def _three(returned: Sequence[Any]) -> Sequence[Any]:
    """Return what `forward` has returned as a triple of output, loss and weight.

    The weight is None if `forward` has not returned a weight.
    """
    return returned if len(returned) == 3 else [*returned, None]


def _as_metric(weight: Any) -> dict[str, Any]:
    return {} if weight is None else {BATCH_WEIGHT: weight}


def _scaled(optimizer: Any, loss: Any) -> Any:
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _unscaled(optimizer: Any, gradients: Sequence[Any]) -> Any:
    unscale = getattr(optimizer, "get_unscaled_gradients", None)
    return gradients if unscale is None else unscale(gradients)


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
