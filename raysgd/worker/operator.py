"""The base of the operators of all frameworks.

Users derive a class from an operator and set whatever attributes they like. So the library keeps all that it needs in
one object under one name, `_raysgd`, which they do not hit by accident. Private names that subclasses read since the
first version of the library are views on it, and assignments to those are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate

from raysgd._numbers.meters import NUM_SAMPLES, AverageMeterCollection, MetricSummary
from raysgd._numbers.timers import TimerCollection
from raysgd._text.frames import defined_at
from raysgd._text.log_lines import Once
from raysgd.engine.shared.types import World
from raysgd.exceptions import InvalidRegistrationError, NotRegisteredError
from raysgd.worker.data.around_batch import note, set_apart, with_logged
from raysgd.worker.worker_callbacks import InstalledCallbacks

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
    """Let type checkers accept an override that takes fewer arguments, as the library does; change nothing."""
    return method


class ReadOnlyView:
    """An attribute that shows what the library keeps, and refuses assignments.

    Args:
        path: Where it is in the `Internals`.
        way_out: What to do instead of an assignment.
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
        context: The place of the operator among its replicas, and the objects that it works with.
        latest_metrics: What the last batch reported.
        logged: What was passed to `log` since then.
        logged_outside: What was passed to it before a batch began.
        meters_to_fill: Where the next `train_epoch` counts: the meters of the call.
        meters: Where the last one counts, or has counted.
        lost: What ranks had measured in this call that are gone, on the rank that counts it.
        once: What was said already.
        callbacks: What runs around each step in this worker.
        place: Where the batch is that is trained on or evaluated.
    """

    _operator: Any  # whose methods report metrics

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
        """The place among the replicas."""
        world: World = self.context.world
        return world

    @property
    def use_gpu(self) -> bool:
        """True if there is a GPU to use."""
        use_gpu: bool = self.context.settings.use_gpu
        return use_gpu

    def take_place(self, world: World) -> None:
        """Go on in another group."""
        self.context = replace(self.context, world=world)

    def follow(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Return what the library itself does when entries of the config have changed: nothing here."""

    def info_of_call(self, num_steps: int | None, epoch_idx: int) -> dict[str, Any]:
        """Return what the library adds to the `info` of a training call."""
        return {NUM_STEPS: num_steps, "epoch_idx": epoch_idx}

    def new_meters(self) -> AverageMeterCollection:
        """Meters for one epoch."""
        return AverageMeterCollection()

    def take_meters(self) -> AverageMeterCollection:
        """Return those of the call, once; then new ones."""
        self.meters, self.meters_to_fill = self.meters_to_fill or self.new_meters(), None
        return self.meters

    def begin_batch(self) -> None:
        """Called before a batch is trained on or evaluated: what was logged by then belongs to the call."""
        if self.logged:
            set_apart(self)

    def num_samples(self, batch: Any) -> int:
        """Return how many samples of a batch count."""
        raise NotImplementedError

    def completed(self, metrics: Any, batch: Any) -> Any:
        """Metrics of a batch together with what was logged in it, and what they are averaged by, if they do not say it.

        Those that are complete stay as they are, and so does what is no dict of metrics.
        """
        if not isinstance(metrics, Mapping):
            return metrics
        if self.logged:
            metrics = with_logged(metrics, self.logged)
        return metrics if NUM_SAMPLES in metrics else {**metrics, NUM_SAMPLES: self.num_samples(batch)}

    def parted(self, metrics: Mapping[str, Any], method: str) -> tuple[dict[str, Any], Any]:
        """Metrics of a batch that a method returned, with those that were logged and without their weight, and that.

        Raises:
            TypeError: They are no dict.
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
    """The base of the class that users subclass, without any framework; `TrainingOperator` completes it."""

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
        """Create everything and register it. Runs once in each worker, inside the process group.

        Args:
            config: The trainer's `config`, with the batch size under `BATCH_SIZE` already divided by the workers.
        """
        raise NotImplementedError("Override `setup` to create and register models and optimizers.")

    def log(self, name: str, value: Any) -> None:
        """Report a metric of the batch, beside those that `train_batch` or `validate_batch` returns.

        It is averaged in the same way: by the samples of the batch, over batches and workers. Call it anywhere inside
        these methods. If a name is logged twice in a batch, the last value counts; if it is also returned, that one.

        Args:
            name: The name in the result of `train` or `validate`.
            value: A number, a tensor of one element, or a metric object of torchmetrics.

        Raises:
            TypeError, ValueError: This cannot be the name of a metric.
        """
        note(self._raysgd.logged, name, value)

    def skip_batch(self) -> None:
        """Leave out the batch that was drawn last, on all workers: no training follows for it."""
        if self._raysgd.place is not None:
            self._raysgd.place.skip()

    @rung
    def predict_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """Predict one batch: what the model returns for it, or the `logits` in that. For `trainer.predict`.

        The models are in evaluation mode, and no gradients are kept.

        Args:
            batch: A batch of the data. The stock method passes it to the model as training does, without its target.
            batch_info: `batch_idx`, `has_target` (whether the last part of a batch that is a tuple is a target), and
                the entries of `info`.

        Returns:
            One result for each row, in their order: a tensor, an array, or a list with an entry for each row; for
            several results a tuple or a dict of these.
        """
        return self._raysgd.predict(batch, batch_info)

    def state_dict(self) -> Any:
        """State of your own for checkpoints and recovery; what is registered is taken care of. Return CPU data."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what `state_dict` returned, which may be None."""

    def world_changed(self) -> None:
        """Called on every worker after the number of workers has changed under it, with the new `world_size`.

        For what `setup` computed from the number of workers, such as a learning rate. A worker that steps in has run
        `setup`; one that stayed has not run it again.
        """

    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        """Called on every worker after `trainer.update_config`; an exception refuses the change, on all workers.

        A worker that starts later runs `setup` with the config from before, and then this, once for each change.

        With PyTorch, learning rates that were `config["lr"]` after `setup` follow it; a new one multiplies the whole
        schedule. Override it, and call `super`, for what else `setup` computed from the config.

        Args:
            config: The config with the new values.
            changed: The values before, by the names that were changed.
        """
        self._raysgd.follow(config, changed)

    @property
    def config(self) -> dict[str, Any]:
        """The config, with the batch size under `BATCH_SIZE` divided by the workers."""
        config: dict[str, Any] = self._raysgd.config
        return config

    @property
    def world_rank(self) -> int:
        """Rank among all workers; 0 when alone."""
        rank: int = self._raysgd.world.rank
        return rank

    @property
    def local_rank(self) -> int:
        """Rank among the workers of this node."""
        rank: int = self._raysgd.world.local_rank
        return rank

    @property
    def use_gpu(self) -> bool:
        """True if the trainer requested a GPU and there is one."""
        use_gpu: bool = self._raysgd.use_gpu
        return use_gpu


def class_of_creators(
    own: type[BaseOperator], creators_cls: type[BaseOperator], members: Mapping[str, Any]
) -> type[Any]:
    """Return the operator class of creator functions, with the methods of an own class, whose `setup` follows theirs.

    Args:
        own: The class whose `from_creators` was called.
        creators_cls: The operator that calls creators.
        members: The creators, by the names under which it looks for them.
    """
    if issubclass(creators_cls, own):
        return type("CustomCreatorOperator", (creators_cls,), dict(members))

    def setup(self: Any, config: dict[str, Any]) -> None:
        creators_cls.setup(self, config)
        if own.setup is not BaseOperator.setup:
            own.setup(self, config)

    return type(own.__name__, (own, creators_cls), {**members, "setup": setup, "__module__": own.__module__})


def take_place(operator: BaseOperator, world: World) -> None:
    """Let an operator go on in another group."""
    operator._raysgd.take_place(world)
    operator.world_size = world.size


def made_by_hand(operator_cls: type[Any]) -> TypeError:
    """Return what to raise where a program makes an operator itself."""
    name = operator_cls.__name__
    return TypeError(
        f"`{name}()`: workers make the operators, each its own. Pass the class itself, `training_operator_cls={name}`."
    )


def check_is_set_up(operator: BaseOperator) -> None:
    """Raise if an `__init__` of the user has not called that of the library."""
    if not hasattr(operator, "_raysgd"):
        name = type(operator).__name__
        raise TypeError(
            f"`{name}.__init__` does not call `super().__init__(*args, **kwargs)`. Write no `__init__`: create and "
            f"register everything in `setup`.{defined_at(type(operator), '__init__')}"
        )


def required(operator: BaseOperator, name: str) -> Any:
    """An attribute that the stock methods need.

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
    """The objects of one kind, and the kind of container that they came in.

    Attributes:
        items: The objects.
        container: `tuple`, `list`, or None for a single object.
    """

    items: list[Any]
    container: type | None

    def mirror(self, items: Sequence[Any]) -> Any:
        """`items` in the container that the user used."""
        if self.container is None:
            return items[0]
        return tuple(items) if self.container is tuple else list(items)


def parts_of(
    name: str, given: Any, is_one: Callable[[Any], bool], what: str, *, may_be_empty: bool = False
) -> RegisteredParts:
    """One object or several of a kind.

    Args:
        name: The argument that they were passed as.
        given: What was passed.
        is_one: Whether an object is of that kind. It may be iterable as well.
        what: The kind, in words.
        may_be_empty: Whether a container of none will do.

    Raises:
        InvalidRegistrationError: Something in it is of another kind, or there is none.
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
