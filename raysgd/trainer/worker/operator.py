"""The base of the operators of all frameworks.

Users subclass an operator and set any attributes. The library therefore keeps its own data in one object, `_raysgd`,
whose name they do not use by accident. Private names that subclasses have read since the first version of the library
are views of it, which refuse assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate

from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.meters import NUM_SAMPLES, AverageMeterCollection, MetricSummary
from raysgd.core.numbers.timers import TimerCollection
from raysgd.core.text.frames import defined_at
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import InvalidRegistrationError, NotRegisteredError
from raysgd.trainer.worker.data.around_batch import note, set_apart, with_logged
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    OperatorT = TypeVar("OperatorT", bound="BaseOperator", default=Any)
else:
    from typing import TypeVar  # without a default, before Python 3.13

    OperatorT = TypeVar("OperatorT")

SelfT = TypeVar("SelfT")
ResultT = TypeVar("ResultT")

NUM_STEPS = "__num_steps__"

_OF_TRAINER = "It comes from the trainer."


def rung(method: Callable[Concatenate[SelfT, ...], ResultT]) -> Callable[Concatenate[SelfT, ...], ResultT]:
    """Let type checkers accept an override with fewer arguments, which the library accepts. Return the method."""
    return method


class ReadOnlyView:
    """A read-only attribute of an operator that shows a value of its `Internals`.

    Args:
        path: Path of the value in the `Internals`.
        way_out: Sentence of the error that says what to do instead.
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
    """The library's record of one operator.

    Attributes:
        config: The config of this worker.
        context: Rank and group size of the operator, and the objects that it works with.
        latest_metrics: Metrics of the last batch.
        logged: Metrics passed to `log` since the last batch reported.
        logged_outside: Metrics passed to `log` outside of any batch.
        meters_to_fill: Meters of the call, for the next `train_epoch`; None once it has taken them.
        meters: Meters of the last `train_epoch`.
        lost: Metrics of this call from workers that were lost. Empty except on rank 0, which counts them.
        once: Messages that were logged already.
        callbacks: Worker callbacks of this operator.
        place: Place of the current batch in its step. With PyTorch, the `Leg` of the running call.
    """

    _operator: Any  # reports the metrics

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
        self.place: Any = None

    @property
    def world(self) -> World:
        """Rank of this worker, and size of the group."""
        world: World = self.context.world
        return world

    @property
    def use_gpu(self) -> bool:
        """True if this worker uses a GPU."""
        use_gpu: bool = self.context.settings.use_gpu
        return use_gpu

    def take_place(self, world: World) -> None:
        """Continue in a new group."""
        self.context = replace(self.context, world=world)

    def follow(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Apply changed config entries. The base class ignores them."""

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        """Return the entries that the library adds to the `info` of a training call."""
        return {NUM_STEPS: num_steps, "epoch_idx": epoch_idx}

    def new_meters(self) -> AverageMeterCollection:
        """Return empty meters for one epoch."""
        return AverageMeterCollection()

    def take_meters(self) -> AverageMeterCollection:
        """Return the meters of the call the first time, then new ones."""
        self.meters, self.meters_to_fill = self.meters_to_fill or self.new_meters(), None
        return self.meters

    def begin_batch(self) -> None:
        """Begin a batch. Metrics logged since the last one belong to the result of the call, not to this batch."""
        if self.logged:
            set_apart(self)

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch that count."""
        raise NotImplementedError

    def completed(self, metrics: Any, batch: Any) -> Any:
        """Return the metrics of a batch with the logged ones, and with their number of samples if it is missing.

        A value that is not a dict of metrics is returned unchanged.
        """
        if not isinstance(metrics, Mapping):
            return metrics
        if self.logged:
            metrics = with_logged(metrics, self.logged)
        return metrics if NUM_SAMPLES in metrics else {**metrics, NUM_SAMPLES: self.num_samples(batch)}

    def parted(self, metrics: Mapping[str, Any], method: str) -> tuple[dict[str, Any], Any]:
        """Split what a method returned for a batch into metrics, with the logged ones, and the number of samples.

        Raises:
            TypeError: The method returned no dict.
        """
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"`{type(self._operator).__name__}.{method}` returned a `{type(metrics).__name__}`: return a dict of "
                f"metrics, an empty one if there are no metrics.{defined_at(type(self._operator), method)}"
            )
        metrics = self.latest_metrics = with_logged(metrics, self.logged) if self.logged else metrics
        values = dict(metrics)
        return values, values.pop(NUM_SAMPLES, 1)


class BaseOperator:
    """The part of an operator that needs no framework. Users subclass `TrainingOperator`, which is based on it."""

    resumes_epochs: bool | None = None
    warms_up: bool = True
    compares_ranks: bool | Sequence[Any] = True

    _raysgd: Any
    _config = ReadOnlyView("config")

    def __init__(self, config: dict[str, Any], internals: Internals) -> None:
        self._raysgd = internals
        self.world_size = internals.world.size
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(config)

    def setup(self, config: dict[str, Any]) -> None:
        """Create and register models, optimizers and data. Runs once in each worker, when the process group is open.

        Args:
            config: The trainer's `config`. The batch size under `BATCH_SIZE` is already divided by the number of
                workers.
        """
        raise NotImplementedError("Override `setup` to create and register models and optimizers.")

    def log(self, name: str, value: Any) -> None:
        """Report a metric of the batch, in addition to those that `train_batch` or `validate_batch` returns.

        It is averaged like these: over batches and workers, weighted by samples. Call it anywhere inside these methods.
        If a name is logged twice in a batch, the last value counts. A returned value goes before a logged one.

        Args:
            name: Name of the metric in the result of `train` or `validate`.
            value: A number, a tensor of one element, or a metric object of torchmetrics.

        Raises:
            TypeError, ValueError: `name` cannot be the name of a metric, or `value` is a symbolic tensor of TensorFlow.
        """
        note(self._raysgd.logged, name, value)

    def skip_batch(self) -> None:
        """Leave out the batch that was drawn last. Call it on all workers; no training may follow for this batch."""
        if self._raysgd.place is not None:
            self._raysgd.place.skip()

    @rung
    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """Predict one batch for `trainer.predict`. By default, return the model's output, or the `logits` in it.

        The models are in evaluation mode, and no gradients are kept.

        Args:
            batch: A batch of the data. The stock method passes it to the model as training does, without its target.
            batch_info: `batch_idx`, `has_target` (True if the last part of a batch that is a tuple is a target), and
                the entries of `info`.

        Returns:
            One result for each row, in order: a tensor, an array, or a list. For several results, a tuple or a dict of
            these.
        """
        return self._raysgd.predict(batch, batch_info)

    def state_dict(self) -> Any:
        """Return your own state for checkpoints and recovery, on the CPU. Registered objects are saved without it."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned, which may be None."""

    def world_changed(self) -> None:
        """Called on every worker when the number of workers has changed. `world_size` is the new number.

        Override it to update what `setup` computed from the number of workers, such as a learning rate. A new worker
        has just run `setup`; a worker that stayed does not run it again.
        """

    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        """Called on every worker after `trainer.update_config`. An exception refuses the change on all workers.

        A worker that starts later runs `setup` with the original config, then this method once for each change.

        With PyTorch, learning rates that were `config["lr"]` after `setup` follow it; a new rate scales the whole
        schedule. To update something else that `setup` computed from the config, override this and call `super`.

        Args:
            config: The config with the new values.
            changed: The previous values of the changed entries, by name.
        """
        self._raysgd.follow(config, changed)

    @property
    def config(self) -> dict[str, Any]:
        """The config. The batch size under `BATCH_SIZE` is divided by the number of workers."""
        config: dict[str, Any] = self._raysgd.config
        return config

    @property
    def world_rank(self) -> int:
        """Rank among all workers; 0 for a single worker."""
        rank: int = self._raysgd.world.rank
        return rank

    @property
    def local_rank(self) -> int:
        """Rank among the workers of this node."""
        rank: int = self._raysgd.world.local_rank
        return rank

    @property
    def use_gpu(self) -> bool:
        """True if the trainer requested GPUs and this worker has one."""
        use_gpu: bool = self._raysgd.use_gpu
        return use_gpu


def class_of_creators(
    own: type[BaseOperator], creators_cls: type[BaseOperator], members: Mapping[str, Any]
) -> type[Any]:
    """Return an operator class that calls creator functions and has the methods of a user's class.

    The `setup` of the user's class runs after the creators.

    Args:
        own: The class whose `from_creators` was called.
        creators_cls: The operator class that calls creators.
        members: The creators, by the attribute names that `creators_cls` uses.
    """
    if issubclass(creators_cls, own):
        return type("CustomCreatorOperator", (creators_cls,), dict(members))

    def setup(self: Any, config: dict[str, Any]) -> None:
        creators_cls.setup(self, config)
        if own.setup is not BaseOperator.setup:
            own.setup(self, config)

    return type(own.__name__, (own, creators_cls), {**members, "setup": setup, "__module__": own.__module__})


def take_place(operator: BaseOperator, world: World) -> None:
    """Let an operator continue in a new group."""
    operator._raysgd.take_place(world)
    operator.world_size = world.size


def made_by_hand(operator_cls: type[Any]) -> TypeError:
    """Return the error for a program that makes an operator itself."""
    name = operator_cls.__name__
    return TypeError(
        f"`{name}()`: workers make the operators, each its own. Pass the class itself, `training_operator_cls={name}`."
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
    """Return an attribute that the stock methods need.

    Raises:
        NotRegisteredError: The user's class does not set it.
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
    """Registered objects of one kind, with the type of container that the user passed.

    Attributes:
        items: The objects.
        container: `tuple`, `list`, or None for a single object.
    """

    items: list[Any]
    container: type | None

    def mirror(self, items: Sequence[Any]) -> Any:
        """Return `items` in the container that the user passed."""
        if self.container is None:
            return items[0]
        return tuple(items) if self.container is tuple else list(items)


def parts_of(
    name: str, given: Any, is_one: Callable[[Any], bool], what: str, *, may_be_empty: bool = False
) -> RegisteredParts:
    """Return the objects in an argument of `register`: one object, or a container of several.

    Args:
        name: Name of the argument.
        given: Value of the argument.
        is_one: Returns True for an object of the expected kind, which may be iterable itself.
        what: The expected kind, in words, for the error.
        may_be_empty: True to accept an empty container.

    Raises:
        InvalidRegistrationError: An object is of another kind, or there is none.
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
