"""Population-based training: several trainers train at the same time, and the worst of them copy the best.

Each member of a population is a trainer with a config. After an interval of training, a member with a bad result
receives a better member's trained state from memory, and continues with new training operators and a config similar to
the better member's config. Copying a member writes no files and, except with Horovod, restarts no processes.

ADR 72 explains why this module uses no scheduler of Ray Tune.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any

from raysgd.callbacks.early_stopping import Mode, WatchedMetric
from raysgd.core import arguments as checks
from raysgd.core.numbers.ranking import MAX
from raysgd.core.text.secrets import masked

__all__ = ["Exploit", "Exploration", "Member", "Population", "train_and_validate"]

logger = logging.getLogger(__name__)

Space = Mapping[str, Any]
"""Maps each name in a config to the source of its value: a list of choices, a function without parameters that draws a
value, an object with a `sample` method (such as `tune.loguniform(...)`), a space for a nested dict, or a fixed value.
"""
# Seconds between interrupts after Ctrl-C. The interrupts are repeated until all members stop, because each interrupt
# only ends the running call, such as `train`, and a member's `step` function may then make another call.
_INTERRUPT_EVERY_S = 0.1
_NEEDED = ("train", "validate", "reset_config", "take_state_of", "shutdown")


@dataclass
class Member:
    """One member of a population: a trainer and its config.

    Attributes:
        index: The member's number, from 0, which never changes.
        config: The config with which the member currently trains.
        trainer: The `TorchTrainer` or `TFTrainer` that trains the member's model.
        result: The result of the last interval, which by default is an epoch of training and a validation. Empty
            before the first interval, during an interval, after a failed interval, and after a restart with another
            config. A member that copied a better member has that member's result until its next interval starts.
        history: The results of all completed intervals. Each result contains the interval's config under the key
            `config`.
    """

    index: int
    config: dict[str, Any]
    trainer: Any
    result: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Exploit:
    """Records that a member copied the state of a better member.

    Attributes:
        index: Number of the member that received the state.
        source: Number of the better member.
        config: The receiving member's new config.
    """

    index: int
    source: int
    config: dict[str, Any]


def train_and_validate(trainer: Any) -> dict[str, Any]:
    """Train for one epoch, then validate, and return the metrics of both. This is a population's default interval."""
    return {**trainer.train(), **trainer.validate()}


class Population:
    """Trains several trainers at once, in intervals. Between two intervals, the worst trainers copy the best.

    Args:
        trainer_factory: Function that takes a config and returns a new `TorchTrainer` or `TFTrainer`. Called once per
            member.
        space: Search space from which configs are drawn. Maps each name to a list of choices, a function without
            parameters that draws a value, a domain such as `ray.tune.loguniform(1e-4, 1e-1)`, a nested space, or a
            fixed value.
        size: Number of members. The workers of all members must fit into the cluster at the same time.
        metric: Name of the metric that ranks the members. `step` must return it.
        mode: "min" if the lowest value of the metric is best, "max" if the highest value is best. "auto" decides by
            the metric's name, as in `EarlyStopping`.
        step: Function that runs one interval on a trainer and returns a dict of metrics. Default: `train`, then
            `validate`.
        quantile: Fraction of the members that copy better members between intervals, at most 0.5. For example, if it is
            0.25 and there are 8 members, each of the 2 worst members copies one of the 2 best. The number of members
            that copy is rounded up, but is never more than half of all members.
        exploration: Rules for changing the config that a member copies from a better member.
        seed: Seed for the random choices of the population. It does not affect functions in `space`, or objects with a
            `sample` method that are not from Ray Tune.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.
        TypeError: `trainer_factory` did not return a trainer. All trainers that it did return were shut down.

    Examples:
        >>> def make(config):
        ...     return TorchTrainer(training_operator_cls=MyOperator, config=config, num_workers=2)
        >>> with Population(make, {"lr": [0.01, 0.1, 1.0]}, size=4) as population:  # doctest: +SKIP
        ...     best = population.run(num_intervals=10)
        ...     best.trainer.save("best.pt")
    """

    def __init__(
        self,
        trainer_factory: Callable[[dict[str, Any]], Any],
        space: Space,
        size: int,
        *,
        metric: str = "val_loss",
        mode: Mode = "auto",
        step: Callable[[Any], Mapping[str, Any]] = train_and_validate,
        quantile: float = 0.25,
        exploration: Exploration | None = None,
        seed: int | None = None,
    ) -> None:
        for name, function in {"trainer_factory": trainer_factory, "step": step}.items():
            checks.check_kind(name, function, Callable, "a function")
        check_space(space)
        size = checks.check_count("size", size, hint="It is the number of trainers.")
        if not checks.is_number(quantile) or not 0 < quantile <= 0.5:
            raise ValueError(f"`quantile={quantile!r}`: need a number above 0, and at most 0.5.")
        checks.check_kind("exploration", exploration, Exploration | None, "an `Exploration`, or None")
        if seed is not None:
            checks.check_seed(seed)
        self._space, self._metric = space, metric
        self._sign = 1 if WatchedMetric("Population", metric, mode).mode == MAX else -1
        self._step, self._quantile = step, quantile
        self._exploration = exploration or Exploration()
        self._random = Random(seed)
        self.members = self._make_members(trainer_factory, size)

    def _make_members(self, trainer_factory: Callable[[dict[str, Any]], Any], size: int) -> list[Member]:
        configs = [draw(self._space, self._random) for _ in range(size)]
        trainers, errors = _at_the_same_time(lambda config: _made(trainer_factory, config), configs)
        if errors:
            _shutdown_all(trainer for trainer in trainers if trainer is not None)
            raise errors[0]
        return [Member(index, *pair) for index, pair in enumerate(zip(configs, trainers, strict=True))]

    def run(self, num_intervals: int) -> Member:
        """Train all members for several intervals, and call `evolve` between intervals. Return the best member."""
        for interval in range(checks.check_count("num_intervals", num_intervals, hint="Each is one `step`.")):
            if interval:
                self.evolve()
            self.train()
        return self.best

    def train(self) -> list[dict[str, Any]]:
        """Train all members for one interval in parallel, and return their results. Ctrl-C interrupts all members.

        If a member fails, the error is raised after the other members have finished the interval and stored their
        results. The failed member has no result, so it ranks last.

        Raises:
            ValueError: A member's result does not contain the metric.
            Exception: `step` raised this exception for a member.
        """
        results, errors = _at_the_same_time(self._train_member, self.members, self._interrupt)
        if errors:
            raise errors[0]
        return results

    def _train_member(self, member: Member) -> dict[str, Any]:
        member.result = {}
        try:
            result = dict(self._step(member.trainer))
            if self._metric not in result:
                raise ValueError(f"`metric={self._metric!r}` is not in the result, which has {sorted(result)}.")
        except Exception as error:  # user code; the note below says which member raised the error
            logger.error("member %s failed: %r", member.index, error)
            if hasattr(error, "add_note"):  # exists from Python 3.11 on
                error.add_note(
                    f"It was raised by member {member.index} of the population, with {masked(member.config)}."
                )
            raise
        member.result = result
        member.history.append({**result, "config": member.config})
        return result

    def _interrupt(self) -> None:
        for member in self.members:
            member.trainer._life.interrupt()

    def evolve(self) -> list[Exploit]:
        """Let each of the worst members copy one of the best members, chosen at random, and change the copied config.

        Returns:
            A record of each copy.
        """
        num_copies = min(math.ceil(len(self.members) * self._quantile), len(self.members) // 2)
        ranked = self.ranked
        worse = ranked[len(ranked) - num_copies :]
        return [self._exploit(member, self._random.choice(ranked[:num_copies])) for member in worse]

    def _exploit(self, member: Member, source: Member) -> Exploit:
        config = self._exploration.changed(source.config, self._space, self._random)
        self.copy(member, source, config)
        logger.info("member %s copies member %s and continues with %s", member.index, source.index, masked(config))
        return Exploit(member.index, source.index, config)

    def copy(self, member: Member, source: Member, config: Mapping[str, Any] | None = None) -> None:
        """Copy the trained state (such as weights and optimizers) and the last result of one member to another.

        Args:
            member: The member that receives the state.
            source: The member whose state is copied.
            config: A new config for `member`, which is then restarted before the copy. None to leave the config of
                `member` unchanged.
        """
        if config is not None:
            self.restart(member, config)
        member.trainer.take_state_of(source.trainer)
        member.result = dict(source.result)

    def restart(self, member: Member, config: Mapping[str, Any]) -> None:
        """Start a member again from the beginning, with another config and new training operators.

        The member loses its trained state and its result, but not its `history`. Except with Horovod, it keeps its
        worker processes.
        """
        member.trainer.reset_config(config)
        member.config, member.result = dict(config), {}

    @property
    def ranked(self) -> list[Member]:
        """The members, best first. Members without a result come last."""
        return sorted(self.members, key=self._score, reverse=True)

    @property
    def best(self) -> Member:
        """The member whose last result is the best."""
        return self.ranked[0]

    def _score(self, member: Member) -> float:
        score = self._sign * float(member.result.get(self._metric, math.nan))
        return -math.inf if math.isnan(score) else score

    def shutdown(self) -> None:
        """Shut down the trainers of all members."""
        _shutdown_all(member.trainer for member in self.members)

    def __enter__(self) -> Population:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _made(trainer_factory: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    trainer = trainer_factory(dict(config))
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        if hasattr(trainer, "shutdown"):
            trainer.shutdown()
        raise TypeError(
            f"`trainer_factory` returned a `{type(trainer).__name__}`, which has no `{missing[0]}`: return a "
            "`raysgd.TorchTrainer` or a `raysgd.TFTrainer`."
        )
    return trainer


def _at_the_same_time(
    function: Callable[[Any], Any], values: Sequence[Any], interrupt: Callable[[], None] = lambda: None
) -> tuple[list[Any], list[BaseException]]:
    """Call a function with each value, each call in its own thread.

    Args:
        function: The function to call.
        values: The values to call it with.
        interrupt: Function to call repeatedly after Ctrl-C, until all calls have ended.

    Returns:
        The results, with None for each call that raised an exception; and the list of these exceptions.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C. Raised after all calls have ended.
    """
    with ThreadPoolExecutor(len(values), thread_name_prefix="raysgd-population") as threads:
        futures = [threads.submit(function, value) for value in values]
        try:
            wait(futures)
        except KeyboardInterrupt:
            interrupt()
            while wait(futures, _INTERRUPT_EVERY_S).not_done:
                interrupt()
            raise
    raised = [future.exception() for future in futures]
    errors = [error for error in raised if error is not None]
    return [None if error else future.result() for future, error in zip(futures, raised, strict=True)], errors


def _shutdown_all(trainers: Iterable[Any]) -> None:
    for trainer in trainers:
        trainer.shutdown()


# ---------------------------------------------------------------------------------------------------------- configs


@dataclass(frozen=True)
class Exploration:
    """Rules for changing the config that a member of a population copies from a better member.

    Attributes:
        resample_probability: Probability that an entry is drawn again from the search space instead of being changed
            slightly.
        factors: A numeric entry is changed by multiplying it by one of these factors, chosen at random. An entry with a
            list of choices, or with `tune.choice`, is changed to the previous or next choice instead, if there is one.
            Other entries, such as a string that a function drew, change only when they are drawn again.

    Raises:
        ValueError: A value is out of range.
    """

    resample_probability: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.2)

    def __post_init__(self) -> None:
        if not checks.is_number(self.resample_probability) or not 0 <= self.resample_probability <= 1:
            raise ValueError(f"`resample_probability={self.resample_probability!r}`: need a number from 0 to 1.")
        if not self.factors or not all(checks.is_number(factor) and factor > 0 for factor in self.factors):
            raise ValueError(f"`factors={self.factors!r}`: need at least one number, each more than 0.")

    def changed(self, config: Mapping[str, Any], space: Space, random: Random) -> dict[str, Any]:
        """Return a changed copy of a config.

        Args:
            config: The config to copy.
            space: The search space. Config entries that are not in the space stay unchanged. Entries with a fixed value
                in the space get this value. Entries that the config lacks are drawn.
            random: Generator for all random choices.
        """
        changed = dict(config)
        for name, source in space.items():
            if isinstance(source, Mapping):
                changed[name] = self.changed(config.get(name, {}), source, random)
            elif name not in config or random.random() < self.resample_probability:
                changed[name] = draw_one(source, random)
            else:
                changed[name] = self._near(config[name], source, random)
        return changed

    def _near(self, value: Any, source: Any, random: Random) -> Any:
        choices = source if isinstance(source, list | tuple) else getattr(source, "categories", None)
        if choices is not None:
            return _neighbor(value, choices, random)
        if not is_drawn(source) or not checks.is_number(value):
            return value if is_drawn(source) else source
        return _within(source, type(value)(value * random.choice(self.factors)), value)


def check_space(space: Any) -> None:
    """Check that configs can be drawn from a search space.

    Raises:
        TypeError: `space` is not a dict.
        ValueError: An entry is an empty list.
    """
    checks.check_kind("space", space, Mapping, "a dict, with a list or a function for each name")
    for name, source in space.items():
        if isinstance(source, Mapping):
            check_space(source)
        elif isinstance(source, list | tuple) and not source:
            raise ValueError(f"`space` has `{name!r}: {source!r}`: need at least one choice, or leave it out.")


def draw(space: Space, random: Random) -> dict[str, Any]:
    """Draw a config from a search space."""
    return {
        name: draw(source, random) if isinstance(source, Mapping) else draw_one(source, random)
        for name, source in space.items()
    }


def draw_one(source: Any, random: Random) -> Any:
    """Draw a value from one entry of a search space, such as a list of choices. Return a fixed value unchanged."""
    if isinstance(source, list | tuple):
        return random.choice(source)
    if hasattr(source, "sample"):
        return source.sample(random_state=random.getrandbits(32)) if _takes_seed(source) else source.sample()
    return source() if callable(source) else source


def is_drawn(source: Any) -> bool:
    """Return True if values are drawn from this entry of a search space, and False if the entry is a fixed value."""
    return isinstance(source, list | tuple) or hasattr(source, "sample") or callable(source)


def _takes_seed(source: Any) -> bool:
    return hasattr(source, "get_sampler")  # only Ray Tune's domains have this method, and their `sample` takes a seed


def _neighbor(value: Any, choices: list[Any] | tuple[Any, ...], random: Random) -> Any:
    if value not in choices:
        return random.choice(choices)
    index = choices.index(value) + random.choice((-1, 1))
    return choices[min(max(index, 0), len(choices) - 1)]


def _within(source: Any, changed: Any, value: Any) -> Any:
    """Clip a changed number to the bounds of the search space entry that it was drawn from, if there are bounds.

    Without bounds, keep the former value if the change would make it 0, as `int(1 * 0.8)`.
    """
    lower, upper = getattr(source, "lower", None), getattr(source, "upper", None)
    if lower is None and upper is None:
        return changed or value
    if upper is not None and isinstance(value, int) and _takes_seed(source) and not hasattr(source.get_sampler(), "q"):
        upper -= 1  # Ray Tune never draws the upper bound of integers
    changed = changed if lower is None else max(lower, changed)
    return changed if upper is None else min(upper, changed)
