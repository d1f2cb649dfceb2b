"""Base class of the PyTorch and TensorFlow training operators, which users subclass.

Users set attributes of any name on their operators. To avoid collisions, the library stores its own data in a single
attribute, `_raysgd`. The operators of `ray.util.sgd` had other private attributes, which some users' subclasses read.
These attributes still exist, as read-only views of values in `_raysgd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate

from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.meters import (
    BATCH_COUNT,
    BATCH_WEIGHT,
    NUM_SAMPLES,
    AverageMeterCollection,
    MetricSummary,
    float_each,
    is_weight,
)
from raysgd.core.numbers.timing import TimerCollection
from raysgd.core.text.log_lines import Once
from raysgd.core.text.tracebacks import defined_at
from raysgd.exceptions import InvalidRegistrationError, NotRegisteredError
from raysgd.trainer.messages.epochs import bind_batch_info
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    OperatorT = TypeVar("OperatorT", bound="BaseOperator", default=Any)
else:
    from typing import TypeVar  # does not support `default` before Python 3.13

    OperatorT = TypeVar("OperatorT")

SelfT = TypeVar("SelfT")
ResultT = TypeVar("ResultT")

NUM_STEPS = "__num_steps__"

_OF_TRAINER = "It comes from the trainer."


def rung(method: Callable[Concatenate[SelfT, ...], ResultT]) -> Callable[Concatenate[SelfT, ...], ResultT]:
    """Mark a method that users may override with fewer parameters. Type checkers then accept such an override."""
    return method


class ReadOnlyView:
    """Descriptor for a read-only attribute of an operator, whose value is stored in the operator's `Internals`.

    Args:
        path: Attribute path of the value inside `Internals`, such as "world.rank".
        way_out: Sentence for the error message that says what to do instead of assigning to the attribute.
    """

    def __init__(self, path: str, way_out: str = _OF_TRAINER) -> None:
        self._read = attrgetter(f"_raysgd.{path}")
        self._way_out = way_out
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, operator: Any, owner: type | None = None) -> Any:
        return self if operator is None else self._read(operator)

    def __set__(self, operator: Any, value: Any) -> None:
        raise AttributeError(
            f"`self.{self._name}` belongs to the library and cannot be assigned. {self._way_out} Give your own "
            f"attribute another name, such as `self.my{self._name}`."
        )


class Internals:
    """The library's own data about one operator, stored in the operator's `_raysgd` attribute.

    Attributes:
        config: This worker's config.
        context: The worker's rank and the number of workers, the trainer's settings, and objects of the framework that
            the operator needs, such as the device.
        latest_metrics: Metrics of the last batch.
        logged: Metrics that were passed to `log` since the metrics of the previous batch were collected.
        logged_outside: Metrics that were passed to `log` outside any batch.
        meters_to_fill: Collection in which the next `train_epoch` accumulates its metrics. None after `train_epoch` has
            taken the collection.
        meters: Collection in which the last `train_epoch` has accumulated its metrics.
        lost: Metrics that lost workers measured in this call. Only rank 0 has them, and adds them to its own metrics.
        once: Remembers which messages have been logged, so that no message is logged twice.
        callbacks: The worker callbacks that the operator calls.
    """

    _operator: Any  # the operator whose `_raysgd` attribute is this object

    def __init__(self, config: dict[str, Any], context: Any) -> None:
        self.config = config
        self.context = context
        self.latest_metrics: Mapping[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.logged_outside: dict[str, Any] = {}
        self.meters_to_fill: AverageMeterCollection | None = None
        self.meters = AverageMeterCollection()
        self.lost: Sequence[MetricSummary] = ()
        self.once = Once()
        self.callbacks = InstalledCallbacks()

    @property
    def leg(self) -> Any:
        """Tracks the current batch, see `StepParts.leg`."""
        raise NotImplementedError

    @contextmanager
    def in_call(
        self, meters: AverageMeterCollection | None = None, lost: Sequence[MetricSummary] = ()
    ) -> Iterator[None]:
        """Inside the block, collect the metrics of a training or validation call.

        Args:
            meters: Collection in which a `train_epoch` accumulates its metrics.
            lost: Metrics that lost workers measured in the call. Rank 0 adds them to its own metrics.
        """
        self.take_outside()
        self.meters_to_fill, self.lost, self.latest_metrics = meters, lost, {}
        try:
            yield
        finally:
            self.meters_to_fill = None

    @property
    def world(self) -> World:
        """This worker's rank and the number of workers in its group."""
        world: World = self.context.world
        return world

    @property
    def use_gpu(self) -> bool:
        """True if the trainer requested GPUs for its workers."""
        use_gpu: bool = self.context.settings.use_gpu
        return use_gpu

    def take_rank(self, operator: BaseOperator, world: World) -> None:
        """Store the worker's rank in a new group, and the number of workers there."""
        self.context = replace(self.context, world=world)
        operator.world_size = world.size

    def follow(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Adapt objects such as optimizers to changed entries of the config. The base class does nothing.

        Args:
            config: The config with the new values.
            changed: The previous values of the changed entries, by name.
        """

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        """Return the entries that the library adds to the `info` of a training call."""
        return {NUM_STEPS: num_steps, "epoch_idx": epoch_idx}

    @staticmethod
    def to_floats(tensors: list[Any]) -> list[float]:
        """Convert one-element tensors to floats."""
        return float_each(tensors)

    def new_meters(self) -> AverageMeterCollection:
        """Return an empty collection, in which one epoch can accumulate its metrics."""
        return AverageMeterCollection()

    def take_meters(self) -> AverageMeterCollection:
        """Return the collection in which the running `train_epoch` accumulates its metrics.

        This is `meters_to_fill`, or a new collection if `meters_to_fill` was already taken.
        """
        self.meters, self.meters_to_fill = self.meters_to_fill or self.new_meters(), None
        return self.meters

    def begin_metrics(self) -> None:
        """Start to collect the metrics of a batch.

        Metrics that were logged since the last batch do not belong to this batch. Keep them for the result of the call.
        """
        if self.logged:
            self.logged_outside.update(self.logged)
            self.logged.clear()

    def log(self, name: str, value: Any) -> None:
        """Record a metric that the user passed to `self.log`. A later value of the same name replaces an earlier value.

        Args:
            name: Name of the metric.
            value: Value of the metric.

        Raises:
            TypeError: The name is not a non-empty string, or the value is a symbolic tensor of a TensorFlow graph.
            ValueError: The name is reserved for a counter.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f'`log({name!r}, ...)`: the first argument is the name of a metric, such as "iou".')
        if name in (NUM_SAMPLES, BATCH_WEIGHT, BATCH_COUNT):
            raise ValueError(
                f"`log({name!r}, ...)`: this name is reserved for the weight of averages. Return it from the method "
                "instead."
            )
        if hasattr(value, "graph"):
            raise TypeError(
                f"`log({name!r}, ...)` inside a graph of TensorFlow: return the value from `train_step` or "
                "`test_step`, or call `log` in `train_batch` or `validate_batch`, which are not traced."
            )
        self.logged[name] = value.detach() if hasattr(value, "detach") else value

    def take_outside(self) -> dict[str, Any]:
        """Return the metrics that were logged outside any batch, for the result of the whole call, and clear them."""
        taken = {**self.logged_outside, **self.logged}
        self.logged.clear()
        self.logged_outside.clear()
        return taken

    def _with_logged(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of a batch together with the logged metrics, over which they take precedence."""
        together = {**self.logged, **metrics}
        self.logged.clear()
        return together

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in the batch, not counting padding."""
        raise NotImplementedError

    def completed(self, metrics: Any, batch: Any) -> Any:
        """Return the metrics of a batch with the logged metrics added. Also add the number of samples if it is missing.

        Args:
            metrics: The metrics that the operator's method returned. A value that is not a dict is returned unchanged.
            batch: The batch, to count its samples.
        """
        if not isinstance(metrics, Mapping):
            return metrics
        if self.logged:
            metrics = self._with_logged(metrics)
        return metrics if NUM_SAMPLES in metrics else {**metrics, NUM_SAMPLES: self.num_samples(batch)}

    def values_and_weight(self, metrics: Mapping[str, Any], method: str) -> tuple[dict[str, Any], Any]:
        """Split the result of a batch into its metrics, including logged ones, and its number of samples.

        If the result has no number of samples, the number is 1.

        Args:
            metrics: The value that the operator's method returned.
            method: Name of the method, for the error message.

        Raises:
            TypeError: The method did not return a dict.
        """
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"`{type(self._operator).__name__}.{method}` returned a `{type(metrics).__name__}`: return a dict of "
                f"metrics, an empty one if there are no metrics.{defined_at(type(self._operator), method)}"
            )
        metrics = self.latest_metrics = self._with_logged(metrics) if self.logged else metrics
        values = dict(metrics)
        return values, values.pop(NUM_SAMPLES, 1)

    def predict(self, batch: Any, info: Mapping[str, Any]) -> Any:
        """Return the model's output for a batch. This is the default `predict_batch`."""
        raise NotImplementedError

    def validated(self, batches: Iterable[Any], info: Mapping[str, Any] | None) -> MetricSummary:
        """Call the operator's `validate_batch` for each batch, and return the averages of the metrics.

        Args:
            batches: The validation data.
            info: Entries for the `batch_info` of `validate_batch`.
        """
        meters, validate_batch = self.new_meters(), bind_batch_info(self._operator.validate_batch)
        for batch_idx, batch in enumerate(batches):
            metrics = validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
            meters.update(*self.values_and_weight(metrics, "validate_batch"))
        return meters.summary()


class BaseOperator:
    """The part of a training operator that does not depend on the framework.

    Users subclass `TrainingOperator`, which derives from this class.
    """

    resumes_epochs: bool | None = None
    warms_up: bool = True
    compares_ranks: bool | Sequence[Any] = True

    _raysgd: Internals
    _config = ReadOnlyView("config")

    def __init__(self, config: dict[str, Any], internals: Internals) -> None:
        self._raysgd = internals
        self.world_size = internals.world.size
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(config)

    def setup(self, config: dict[str, Any]) -> None:
        """Create and register models, optimizers and data.

        Runs once in each worker, after it has joined its process group.

        Args:
            config: The trainer's `config`. The batch size under `BATCH_SIZE` is already divided by the number of
                workers. However, with `split_batches`, it is the global batch size, and with `deterministic`, the size
                of one shard.
        """
        raise NotImplementedError("Override `setup` to create and register models and optimizers.")

    def log(self, name: str, value: Any) -> None:
        """Report an additional metric of the batch, besides the metrics that `train_batch` or `validate_batch` returns.

        The metric is averaged like returned metrics: over batches and workers, weighted by samples. Call this method
        anywhere inside `train_batch` or `validate_batch`. If a name is logged twice in a batch, the last value counts.
        A returned value takes precedence over a logged value.

        Args:
            name: Name of the metric in the result of `train` or `validate`.
            value: A number, a one-element tensor, or a torchmetrics metric object.

        Raises:
            TypeError, ValueError: `name` is not a valid metric name, or `value` is a symbolic TensorFlow tensor.
        """
        self._raysgd.log(name, value)

    def skip_batch(self) -> None:
        """Leave the current batch out of training.

        Call this method on all workers. Do not train on the batch after this call.

        Raises:
            ValueError: With PyTorch, the step accumulates gradients, and the batch has had no backward pass.
        """
        self._raysgd.leg.skip()

    @rung
    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """Predict one batch for `trainer.predict`. By default, return the model's output, or the output's `logits`.

        The models are in evaluation mode, and gradients are disabled.

        Args:
            batch: A batch of the data. The default method passes it to the model as in training, without its target.
            batch_info: A dict with `batch_idx`, `has_target` (True if the last element of a tuple batch is a target),
                and the entries of the `info` that was passed to `predict`.

        Returns:
            One result per row, in row order, as a tensor, an array or a list. To return several results, use a tuple or
            a dict of them.
        """
        return self._raysgd.predict(batch, batch_info)

    def state_dict(self) -> Any:
        """Return state of your own that checkpoints and recovery must include, with tensors on the CPU.

        By default, return None. The state of registered objects is saved automatically.
        """
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state that `state_dict` returned, which may be None."""

    def _check_saved_state(self, state_dict: Any) -> None:
        """Raise a `ValueError` if `load_state_dict` would refuse a state. Called before anything is loaded."""

    def world_changed(self) -> None:
        """Called on every worker after the group of workers has changed. `world_size` is the new number of workers.

        The number may be the same as before, for example if a new worker has replaced a lost one.

        Override this method to update values that `setup` computed from the number of workers, such as a learning rate.
        A new worker has just run `setup`. A worker that stayed does not run `setup` again.
        """

    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        """Called on every worker after `trainer.update_config`. An exception rejects the change on all workers.

        A worker that starts later runs `setup` with the original config, then this method once for each change.

        With PyTorch, learning rates that equaled `config["lr"]` after `setup` follow that entry. A new rate scales the
        whole schedule. To update other values that `setup` computed from the config, override this method and call
        `super().config_changed`.

        Args:
            config: The config with the new values.
            changed: The previous values of the changed entries, by name.
        """
        self._raysgd.follow(config, changed)

    @property
    def config(self) -> dict[str, Any]:
        """This worker's config. The batch size under `BATCH_SIZE` is adapted as described in `setup`."""
        return self._raysgd.config

    @property
    def world_rank(self) -> int:
        """Rank of this worker among all workers. 0 if there is a single worker."""
        return self._raysgd.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker among the workers on the same node."""
        return self._raysgd.world.local_rank

    @property
    def use_gpu(self) -> bool:
        """True if the trainer requested GPUs. With PyTorch, False if this worker has none nevertheless."""
        return self._raysgd.use_gpu


def is_stock(operator: Any, *names: str, of: type[Any] | None = None) -> bool:
    """Return True if the user overrides none of the named methods, in the operator's class or on the object.

    Methods are compared by identity, because a decorated method can have any name.

    Args:
        operator: The training operator.
        names: Names of methods.
        of: Class of the library that must define or inherit the methods. None for any class of the library, such as
            one of its ready-made operators.
    """
    classes = type(operator).__mro__ if of is None else of.__mro__
    ours = [vars(each) for each in classes if each.__module__.startswith("raysgd.")]
    functions = {name: getattr(getattr(operator, name), "__func__", None) for name in names}
    return all(any(name in own and own[name] is function for own in ours) for name, function in functions.items())


@contextmanager
def around_batches(operator: Any, name: str, after: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Inside the block, let a method of the operator also return the number of samples and the logged metrics.

    A wrapper replaces the method, so that the entries are also added in a training loop that the user wrote. The
    wrapper adds them only after the user's method has returned, because that method may do arithmetic on the result of
    the library's default method.

    Args:
        operator: Operator whose method is wrapped.
        name: Name of the method, "train_batch" or "validate_batch".
        after: Function that receives the metrics of each batch and returns the metrics to use instead. None to use the
            metrics unchanged.
    """
    internals, method, was_set = operator._raysgd, getattr(operator, name), name in vars(operator)

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        internals.begin_metrics()
        metrics = internals.completed(method(*args, **kwargs), (*args, *kwargs.values())[0])
        if internals.leg.plan.is_padding and isinstance(metrics, Mapping):
            metrics = {**metrics, **{each: 0 for each in metrics if each == NUM_SAMPLES or is_weight(each)}}
        return metrics if after is None else after(metrics)

    setattr(operator, name, wrapped)
    try:
        yield
    finally:
        if was_set:
            setattr(operator, name, method)  # the user had set this method on the instance
        else:
            delattr(operator, name)


def made_by_hand(operator_cls: type[Any]) -> TypeError:
    """Return the error to raise if the user's code creates an operator, which only the library may do."""
    name = operator_cls.__name__
    return TypeError(
        f"`{name}()`: each worker creates its own operator. Pass the class itself, `training_operator_cls={name}`."
    )


def check_is_set_up(operator: BaseOperator) -> None:
    """Raise `TypeError` if the user's `__init__` did not call `super().__init__`."""
    if not hasattr(operator, "_raysgd"):
        name = type(operator).__name__
        raise TypeError(
            f"`{name}.__init__` does not call `super().__init__(*args, **kwargs)`. Write no `__init__`: create and "
            f"register everything in `setup`.{defined_at(type(operator), '__init__')}"
        )


def required(operator: BaseOperator, name: str) -> Any:
    """Return an attribute of the operator, such as `model`, that the library's default methods need.

    Raises:
        NotRegisteredError: The user's class does not set the attribute.
    """
    try:
        return getattr(operator, name)
    except AttributeError:
        raise NotRegisteredError(
            f"`{type(operator).__name__}` has no `self.{name}`, and the methods of the library use it. Set it in "
            f"`setup` to what `self.register(...)` returns, or override the method that uses it."
            f"{defined_at(type(operator), 'setup')}"
        ) from None


@dataclass(frozen=True)
class RegisteredParts:
    """The objects that the user has passed to one argument of `register`.

    Attributes:
        items: The objects.
        container: Type of the container in which they were passed, `tuple` or `list`. None for a single object.
    """

    items: list[Any]
    container: type | None

    def mirror(self, items: Sequence[Any]) -> Any:
        """Return `items` in a container of the type that the user passed, or as a single object."""
        if self.container is None:
            return items[0]
        return tuple(items) if self.container is tuple else list(items)


def parts_of(
    name: str, given: Any, is_one: Callable[[Any], bool], what: str, *, may_be_empty: bool = False
) -> RegisteredParts:
    """Return the objects that the user passed to one argument of `register`, as one object or in a container.

    Args:
        name: Name of the argument.
        given: Value of the argument.
        is_one: Function that returns True for an object of the expected type. Such an object may itself be iterable.
        what: Description of the expected type, for the error message.
        may_be_empty: Whether to accept an empty container.

    Raises:
        InvalidRegistrationError: An object has the wrong type, or the container is empty.
    """
    if is_one(given):
        return RegisteredParts([given], None)
    is_single = not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping) or hasattr(given, "shape")
    items = [given] if is_single else list(given)
    strangers = [item for item in items if not is_one(item)]
    if strangers or not (items or may_be_empty):
        found = _found(strangers[0]) if strangers else "nothing"
        raise InvalidRegistrationError(f"`register({name}=...)` got {found}: pass {what}, or a list or tuple of them.")
    return RegisteredParts(items, tuple if isinstance(given, tuple) else list)


def _found(item: Any) -> str:
    if isinstance(item, type):
        return f"the class `{item.__name__}` instead of an object of it, `{item.__name__}(...)`"
    return f"`{type(item).__name__}`"
