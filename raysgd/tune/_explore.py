"""Pure: hyperparameters drawn from a space, and changed a little for a trial that copies a better one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from raysgd._arguments import is_number

Space = Mapping[str, Any]
"""For each entry of a config: a list of choices, a function without parameters that draws, something with a method
`sample` (such as `tune.loguniform`), a space for a nested dict, or any other value, which stays as it is."""


@dataclass(frozen=True)
class Exploration:
    """The extent to which a config is changed.

    Attributes:
        resample_probability: How often an entry is drawn again from its space instead.
        factors: What numbers are multiplied by, one of these. Choices move to the one before or behind.

    Raises:
        ValueError: A value is out of range.
    """

    resample_probability: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.2)

    def __post_init__(self) -> None:
        if not is_number(self.resample_probability) or not 0 <= self.resample_probability <= 1:
            raise ValueError(f"`resample_probability={self.resample_probability!r}`: need a number from 0 to 1.")
        if not self.factors or not all(is_number(factor) and factor > 0 for factor in self.factors):
            raise ValueError(f"`factors={self.factors!r}`: need at least one number, each more than 0.")

    def changed(self, config: Mapping[str, Any], space: Space, random: Random) -> dict[str, Any]:
        """A config near another one: what the space does not name, or holds fixed, stays as it is."""
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
        if isinstance(source, list | tuple):
            return _neighbor(value, source, random)
        if not is_drawn(source) or not is_number(value):
            return value if is_drawn(source) else source
        return _within(source, type(value)(value * random.choice(self.factors)))


def check_space(space: Any) -> None:
    """Refuses what configs cannot be drawn from.

    Raises:
        TypeError: It is no dict.
        ValueError: An entry is a list without choices.
    """
    if not isinstance(space, Mapping):
        raise TypeError(f"`space={space!r}`: need a dict, with a list or a function for each name.")
    for name, source in space.items():
        if isinstance(source, Mapping):
            check_space(source)
        elif isinstance(source, list | tuple) and not source:
            raise ValueError(f"`space` has `{name!r}: {source!r}`: need at least one choice, or leave it out.")


def draw(space: Space, random: Random) -> dict[str, Any]:
    """A config from a space."""
    return {
        name: draw(source, random) if isinstance(source, Mapping) else draw_one(source, random)
        for name, source in space.items()
    }


def draw_one(source: Any, random: Random) -> Any:
    """One entry of a config."""
    if isinstance(source, list | tuple):
        return random.choice(source)
    if hasattr(source, "sample"):
        return source.sample(random_state=random.getrandbits(32)) if _takes_seed(source) else source.sample()
    return source() if callable(source) else source


def is_drawn(source: Any) -> bool:
    """Return whether an entry is drawn, and not simply a value."""
    return isinstance(source, list | tuple) or hasattr(source, "sample") or callable(source)


def _takes_seed(source: Any) -> bool:
    return hasattr(source, "get_sampler")  # a domain of Ray Tune


def _neighbor(value: Any, choices: list[Any] | tuple[Any, ...], random: Random) -> Any:
    if value not in choices:
        return random.choice(choices)
    index = choices.index(value) + random.choice((-1, 1))
    return choices[min(max(index, 0), len(choices) - 1)]


def _within(source: Any, value: Any) -> Any:
    """A number inside of the bounds that its source names, if it names some."""
    lower, upper = getattr(source, "lower", None), getattr(source, "upper", None)
    value = value if lower is None else max(lower, value)
    return value if upper is None else min(upper, value)
