"""`TrainingOperator` for TensorFlow: the class that users subclass to say what is trained, on what, and how.

The methods form a ladder; each rung does one thing and calls the next one:

    train_epoch -> train_batch -> train_step -> forward, optimizer_step
    validate    -> validate_batch -> test_step -> forward

`train_step` and what is below it is compiled into a graph. Override the lowest rung that changes what you want to
change; the library keeps doing the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd._meters import AverageMeterCollection
from raysgd._timers import TimerCollection
from raysgd.engine.types import World
from raysgd.exceptions import InvalidRegistrationError, NotRegisteredError
from raysgd.replicas.epochs import bind_batch_info
from raysgd.replicas.putting_back import putting_back
from raysgd.tf import registration
from raysgd.tf.datasets import Sharding, check_dataset, zeros
from raysgd.tf.keras_sync import Synchronizer, variables_of
from raysgd.tf.settings import TFSettings
from raysgd.utils import BATCH_WEIGHT, IS_PADDING, NUM_SAMPLES

NUM_STEPS = "__num_steps__"


@dataclass(frozen=True)
class OperatorContext:
    """The place of one operator among its replicas, and the objects that it works with."""

    settings: TFSettings
    world: World
    synchronizer: Synchronizer = field(default_factory=lambda: Synchronizer(World(rank=0, size=1)))
    strategy: Any = None


class TrainingOperator:
    """Defines a training by subclassing; every worker has one instance.

    Override `setup` (required): create models, optimizers and datasets there, and hand them to `register` and
    `register_data`. With a single `self.model`, `self.optimizer` and `self.loss` nothing else is needed. Do not
    override `__init__`.

    Example:
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
        timers: Timers of the running call; `with self.timers.record("name"):` adds one to `profile=True`.
        global_step: Batches trained on by the stock `train_epoch`.
        run_eagerly: Set it in `setup` to run `train_step` and `test_step` line by line, for a debugger.
        resumes_epochs: Whether an epoch may continue after workers were lost or added, by calling `train_epoch`
            again with the batches that are left. None: yes if `train_epoch` is the stock one. An operator with a
            `train_epoch` of its own may set it to True if that keeps nothing between batches but what the library or
            `state_dict` knows; False makes every loss start from the last snapshot.
        warms_up_standby: Whether a standby worker calls `train_batch` twice on zeros, so that it is fast when it steps
            in. Attributes are put back afterwards. Files and logs are not: check `batch_info.get("warm_up")` before
            you write, or set this to False.
    """

    run_eagerly = False
    resumes_epochs: bool | None = None
    warms_up_standby: bool = True

    def __init__(self, config: dict[str, Any], context: OperatorContext) -> None:
        self._config = config
        self._context = context
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._loss: Any = None
        self._metrics: list[Any] = []
        self._train_dataset: Any = None
        self._validation_dataset: Any = None
        self._sharding: Sharding = "worker"
        self._latest_metrics: dict[str, Any] = {}
        self._meters_to_fill: AverageMeterCollection | None = None
        self._train_function: Any = None
        self._test_function: Any = None
        self._trained: tuple[int, tuple[int, ...]] | None = None  # by what optimizer, and what
        self.world_size = context.world.size
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(config)

    # ------------------------------------------------------------------------------------------------ to override

    def setup(self, config: dict[str, Any]) -> None:
        """Creates everything and registers it. Runs once in each worker, inside the group.

        Args:
            config: The trainer's `config`, with the batch size under `BATCH_SIZE` already divided by the workers.
        """
        raise NotImplementedError("Override `setup` to create and register models and optimizers.")

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Trains on all batches of `iterator` and returns the averaged metrics.

        Args:
            iterator: This worker's batches. Draw one, train on it, draw the next.
            info: What the caller passed as `info`, and the entries that the library adds.
            num_steps: The caller's `num_steps`.
            epoch_idx: Index of the pass over the data, from 0.

        Returns:
            `batch_count`, `num_samples`, for each metric of `train_batch` its mean and `last_<metric>`, and
            `train_<name>` for each registered Keras metric.
        """
        self._forget_stale_steps()  # also of what a method around this one has changed
        info = {**self._own_info(num_steps, epoch_idx), **(info or {})}
        meters, self._meters_to_fill = self._meters_to_fill or AverageMeterCollection(), None
        if not meters.num_batches:
            self._reset_metrics()
        train_batch = bind_batch_info(self.train_batch)
        for batch_idx, batch in enumerate(iterator, start=meters.num_batches):
            is_padding = self._context.synchronizer.step.is_padding
            where = {"batch_idx": batch_idx, "global_step": self.global_step, IS_PADDING: is_padding}
            metrics = train_batch(batch, {**where, **info})
            if not is_padding:
                self._count(meters, metrics)
            self.global_step += 1
        summary = meters.summary()
        summary.update(self._metric_results("train_"))
        return summary

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Takes one optimizer step on one batch.

        Args:
            batch: `(features, target)` or `(features, target, sample_weight)`, as `fit` takes them.
            batch_info: `batch_idx`, `global_step`, `is_padding` and the entries of `info`. In the warm-up of a standby
                worker also `warm_up=True`: the step does not count.

        Returns:
            Metrics of the batch: numbers or tensors of one element. `num_samples` is the weight in the average.
        """
        if self._train_function is None:
            self._train_function = self._compiled(self.train_step)
        with self.timers.record("train_step"):
            metrics = self._train_function(batch)
        return {**metrics, NUM_SAMPLES: self._num_samples(batch)}

    def train_step(self, batch: Any) -> dict[str, Any]:
        """The step itself, as a graph: gradients of the loss, then `optimizer_step`. Returns metrics as tensors."""
        import tensorflow as tf

        model, optimizer = self._require("model"), self._require("optimizer")
        features, target, sample_weight = unpack(batch)
        with tf.GradientTape() as tape:
            output, loss, weight = _three(self.forward(features, target, sample_weight, training=True))
            scaled = _scaled(optimizer, loss if weight is None else self.weighted_loss(loss, weight))
        gradients = _unscaled(optimizer, tape.gradient(scaled, model.trainable_variables))
        self.optimizer_step(gradients)
        self.update_metrics(target, output, sample_weight)
        return {"train_loss": loss, **_as_metric(weight)}

    def forward(self, features: Any, target: Any, sample_weight: Any = None, training: bool = False) -> tuple[Any, ...]:
        """Returns the output of the model and the loss, the mean over the samples. For training and validation.

        Where the loss is the mean over something else, such as tokens, return how much that is as a third thing:
        gradients and metrics are then averaged by it over all workers.
        """
        import tensorflow as tf

        model = self._require("model")
        output = model(features, training=training)
        weights = () if sample_weight is None else (sample_weight,)
        loss = tf.reduce_mean(self._require("loss")(target, output, *weights))
        if model.losses:
            loss += tf.cast(tf.add_n([tf.cast(extra, loss.dtype) for extra in model.losses]), loss.dtype)
        return output, loss

    def optimizer_step(self, gradients: Sequence[Any]) -> None:
        """Steps the optimizer, which takes the mean of the gradients of all workers by samples first."""
        optimizer = self._require("optimizer")
        self._context.synchronizer.require_watched(optimizer)
        variables = self._require("model").trainable_variables
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def update_metrics(self, target: Any, output: Any, sample_weight: Any = None) -> None:
        """Tells every registered Keras metric about a batch."""
        for metric in self._metrics:
            metric.update_state(target, output, sample_weight=sample_weight)

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluates on all batches of `val_iterator` and returns the averaged metrics.

        Ranks may have different numbers of batches, so nothing in the loop may wait for other ranks.
        """
        meters, validate_batch = AverageMeterCollection(), bind_batch_info(self.validate_batch)
        self._reset_metrics()
        for batch_idx, batch in enumerate(val_iterator):
            self._count(meters, validate_batch(batch, {"batch_idx": batch_idx, **(info or {})}))
        summary = meters.summary()
        summary.update(self._metric_results("val_"))
        return summary

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluates one batch: `val_loss`, `val_accuracy` (how often the largest output is the target) and weight."""
        if self._test_function is None:
            self._test_function = self._compiled(self.test_step)
        with self.timers.record("test_step"):
            metrics = self._test_function(batch)
        return {**metrics, NUM_SAMPLES: self._num_samples(batch)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        """The evaluation of a batch, as a graph. Returns metrics as tensors."""
        features, target, sample_weight = unpack(batch)
        output, loss, weight = _three(self.forward(features, target, sample_weight, training=False))
        self.update_metrics(target, output, sample_weight)
        return {"val_loss": loss, "val_accuracy": _accuracy(output, target), **_as_metric(weight)}

    def state_dict(self) -> Any:
        """State of your own for checkpoints and recovery; what is registered is taken care of."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over what `state_dict` returned, which may be None."""

    def world_changed(self) -> None:
        """Called on every worker after the number of workers has changed under it, with the new `world_size`.

        For what `setup` computed from the number of workers, such as a learning rate. A worker that steps in has run
        `setup`; one that stayed has not run it again.
        """

    # ------------------------------------------------------------------------------------------------ to call in setup

    def register(
        self, *, models: Any, optimizers: Any = None, loss: Any = None, metrics: Any = None, **unknown: Any
    ) -> Any:
        """Hands models, optimizers, loss and metrics to the library.

        Optimizers average the gradients of all workers from now on, wherever they are used.

        Args:
            models: One Keras model, or a list or tuple of them.
            optimizers: One Keras optimizer or several; default: those that the models are compiled with.
            loss: A Keras loss, or a function of target and output; the mean over the samples of a batch.
            metrics: Keras metrics, whose state is merged over the workers.
            **unknown: Refused, with advice.

        Returns:
            `(models, optimizers[, loss][, metrics])`, each in the container it was given in.

        Raises:
            InvalidRegistrationError: Something is of the wrong kind.
            IncompatibleModelError: A model does not work with the backend.
            TypeError: An unknown keyword.
        """
        _refuse_unknown(unknown)
        model_parts = registration.models_of(models)
        if optimizers is None:
            for model in model_parts.items:
                registration.require_compiled(model, "`register` without `optimizers`: the operator")
            compiled = [model.optimizer for model in model_parts.items]
            optimizer_parts = registration.Parts(compiled, model_parts.container)
        else:
            optimizer_parts = registration.optimizers_of(optimizers)
        if loss is not None and not callable(loss):
            raise InvalidRegistrationError(
                f"`register(loss={loss!r})`: pass a Keras loss, or a function of target and output."
            )
        metric_parts = None
        if metrics is not None:
            metric_parts = registration.parts_of("metrics", metrics, "update_state", "a Keras metric")
        self._models = model_parts.items
        self._optimizers = [
            registration.with_loss_scale(optimizer, model_parts.items) if optimizers is not None else optimizer
            for optimizer in optimizer_parts.items
        ]
        self._loss = loss
        self._metrics = metric_parts.items if metric_parts is not None else []
        for optimizer in self._optimizers:
            self._context.synchronizer.watch(optimizer)
        result = [models if model_parts.container is None else model_parts.mirror(self._models)]
        result.append(optimizer_parts.mirror(self._optimizers))
        if loss is not None:
            result.append(loss)
        if metric_parts is not None:
            result.append(metric_parts.mirror(self._metrics))
        return tuple(result)

    def register_data(
        self, *, train_dataset: Any = None, validation_dataset: Any = None, sharding: Sharding = "worker"
    ) -> None:
        """Hands the datasets to the library, which divides them over the workers.

        Args:
            train_dataset: A `tf.data.Dataset` of batches, the same on every worker.
            validation_dataset: The same for validation.
            sharding: `"worker"`: a batch is that of one worker. `"global"`: a batch is that of all workers together, as
                with TensorFlow's strategies. A dataset whose auto-shard policy is OFF is used as it is.

        Raises:
            TypeError: Something else than a dataset.
            ValueError: An unknown sharding, or a dataset without batches.
        """
        if sharding not in ("worker", "global"):
            raise ValueError(f'`sharding={sharding!r}`: allowed are "worker" and "global".')
        for name, dataset in (("train_dataset", train_dataset), ("validation_dataset", validation_dataset)):
            if dataset is not None:
                check_dataset(name, dataset)
        self._train_dataset, self._validation_dataset, self._sharding = train_dataset, validation_dataset, sharding

    def average_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """The mean of all workers' gradients by samples, for optimizers that are not registered."""
        return self._context.synchronizer.average(gradients)

    def weighted_loss(self, loss: Any, weight: Any) -> Any:
        """A loss that is the mean over so many tokens, say, made ready for its gradient; all workers have to call it.

        For a `train_step` of your own, which reports `loss` itself and the weight under `raysgd.utils.BATCH_WEIGHT`.
        """
        return self._context.synchronizer.weighted(loss, weight)

    # ------------------------------------------------------------------------------------------------ to read

    @property
    def config(self) -> dict[str, Any]:
        """The config, with the batch size under `BATCH_SIZE` divided by the workers."""
        return self._config

    @property
    def world_rank(self) -> int:
        """Rank among all workers; 0 when alone."""
        return self._context.world.rank

    @property
    def local_rank(self) -> int:
        """Rank among the workers of this node."""
        return self._context.world.local_rank

    @property
    def use_gpu(self) -> bool:
        """Whether the trainer requested a GPU."""
        return self._context.settings.use_gpu

    @property
    def train_dataset(self) -> Any:
        """The registered train dataset, not divided."""
        return self._train_dataset

    @property
    def validation_dataset(self) -> Any:
        """The registered validation dataset, not divided."""
        return self._validation_dataset

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    def from_creators(
        cls, model_creator: Callable[[dict[str, Any]], Any], data_creator: Callable[[dict[str, Any]], Any]
    ) -> type[TrainingOperator]:
        """Makes an operator class out of creator functions; see `raysgd.tf.creator_operator`.

        Args:
            model_creator: `config` -> compiled Keras model.
            data_creator: `config` -> train and test dataset, whose batches are those of all workers together.

        Raises:
            ValueError: One of them is not callable.
        """
        from raysgd.tf.creator_operator import make_operator

        return make_operator(model_creator, data_creator)

    # ------------------------------------------------------------------------------------------------ for the library

    def _require(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise NotRegisteredError(
                f"The stock methods need `self.{name}`: set it in `setup` from what `register` returns, or override "
                f"the method that uses it (`{type(self).__name__}` does neither)."
            ) from None

    def _take_place(self, world: World) -> None:
        self._context = replace(self._context, world=world)
        self.world_size = world.size

    def warm_up(self) -> None:
        """Takes steps on zeros, so that everything that happens for the first time has happened."""
        step = self._context.synchronizer.step
        info = {"batch_idx": 0, "global_step": 0, IS_PADDING: False, "warm_up": True, **self._own_info(None, 0)}
        self._train_function = self._compiled(self.train_step)  # to be kept
        for number in (1, 2):  # two sizes: the second one is traced for all sizes
            step.num_samples = number
            batch = zeros(self._train_dataset.element_spec, number)
            with putting_back(self, undo_of=_undo_of_variable):
                bind_batch_info(self.train_batch)(batch, info)
        step.num_samples = None
        self._reset_metrics()

    def _own_info(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        return {NUM_STEPS: num_steps, "epoch_idx": epoch_idx}

    def _compiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        return method if self.run_eagerly else tf.function(method, reduce_retracing=True)

    def _forget_stale_steps(self) -> None:
        """Lets the steps be traced again if variables or optimizers have changed since."""
        trained = [id(variable) for model in self._models if model.built for variable in model.trainable_variables]
        kind = (id(getattr(self, "optimizer", None)), tuple(trained))
        if kind != self._trained and self._trained is not None:
            self._train_function = self._test_function = None
        self._trained = kind

    def _num_samples(self, batch: Any) -> int:
        from raysgd.tf.datasets import num_samples

        known = self._context.synchronizer.step.num_samples
        return int(num_samples(batch)) if known is None else known

    def _reset_metrics(self) -> None:
        for metric in self._metrics:
            metric.reset_state()

    def _metric_results(self, prefix: str) -> dict[str, float]:
        """The results of the registered metrics over all workers."""
        with self._context.synchronizer.merged(variables_of(self._metrics)):
            return {f"{prefix}{metric.name}": float(metric.result()) for metric in self._metrics}

    def _count(self, meters: AverageMeterCollection, metrics: dict[str, Any]) -> None:
        self._latest_metrics = metrics
        values = {name: _number(value) for name, value in metrics.items() if name != NUM_SAMPLES}
        meters.update(values, n=metrics.get(NUM_SAMPLES, 1))

    def _scope(self) -> AbstractContextManager[Any]:
        """Where models have to be made."""
        strategy = self._context.strategy
        scope: AbstractContextManager[Any] = nullcontext() if strategy is None else strategy.scope()
        return scope


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Features, target and weights of a batch, as `fit` takes them apart."""
    if not isinstance(batch, list | tuple):
        return batch, None, None
    features, target, sample_weight = (*batch, None, None)[:3]
    return features, target, sample_weight


def _three(returned: Sequence[Any]) -> Sequence[Any]:
    """Output, loss and weight; None for a weight that was not given."""
    return returned if len(returned) == 3 else [*returned, None]


def _as_metric(weight: Any) -> dict[str, Any]:
    return {} if weight is None else {BATCH_WEIGHT: weight}


def _number(value: Any) -> Any:
    """A tensor of one element as a number."""
    return value.numpy() if hasattr(value, "numpy") else value


def _scaled(optimizer: Any, loss: Any) -> Any:
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _unscaled(optimizer: Any, gradients: Sequence[Any]) -> Any:
    unscale = getattr(optimizer, "get_unscaled_gradients", None)
    return gradients if unscale is None else unscale(gradients)


def _accuracy(output: Any, target: Any) -> Any:
    """Share of samples whose largest output is the target, a class or one-hot; NaN where that means nothing."""
    import tensorflow as tf

    nothing = tf.constant(float("nan"))
    if not tf.is_tensor(output) or target is None or output.shape.rank is None or output.shape.rank < 2:
        return nothing
    target = tf.convert_to_tensor(target)
    if (output.shape[-1] or 0) < 2 or target.shape.rank is None:
        return nothing
    predicted = tf.argmax(output, axis=-1)
    if target.shape.rank == output.shape.rank and target.shape[-1] == output.shape[-1]:
        actual = tf.argmax(target, axis=-1)
    elif target.dtype.is_integer and target.shape.rank in (output.shape.rank - 1, output.shape.rank):
        actual = tf.reshape(tf.cast(target, tf.int64), tf.shape(predicted))
    else:
        return nothing
    return tf.reduce_mean(tf.cast(tf.equal(predicted, actual), tf.float32))


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    if not unknown:
        return
    hint = ""
    if any(part in name for name in unknown for part in ("loader", "data")):
        hint = "Datasets go into `register_data(train_dataset=..., validation_dataset=...)`. "
    raise TypeError(
        f"`register` does not know {', '.join(f'`{name}`' for name in unknown)}. {hint}"
        "Allowed are models, optimizers, loss and metrics."
    )


def _undo_of_variable(value: Any) -> Callable[[], object] | None:
    import tensorflow as tf

    return partial(value.assign, value.numpy()) if isinstance(value, tf.Variable) else None
