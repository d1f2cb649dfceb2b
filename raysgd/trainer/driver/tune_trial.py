"""Runs a trainer as one Ray Tune trial. All kinds of trainers share this module.

Only this module depends on Ray Tune's interface: the methods that Tune calls, their order, and what they must return.
Code that trains in a trial either implements `TuneTrial`, or subclasses the class that `trainer_trainable` returns.
`ray.tune` is imported inside functions, because not all users install it.

ADR 72 explains why all trainers use one module.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from raysgd.core.imports import pickle_modules_by_name, require
from raysgd.core.numbers.results import as_number
from raysgd.core.sending import packed_bytes
from raysgd.core.text.secrets import masked
from raysgd.exceptions import MissingTuneError, UnpicklableError

Bundles = Sequence[Mapping[str, float]]

_CONFIG_FILE = "trial.json"


@dataclass(frozen=True)
class TrialStepResult:
    """The result of one step of a trial.

    Attributes:
        metrics: The metrics to report to Tune, or None if there are no new metrics.
        has_checkpoint: True if a new checkpoint exists that Tune should save. None leaves the decision to Tune.
        is_last: True if the trial is over.
    """

    metrics: dict[str, Any] | None
    has_checkpoint: bool | None = None
    is_last: bool = False


@dataclass(frozen=True)
class TrialInfo:
    """The name and folder of a trial.

    Attributes:
        logdir: The trial's folder on the node where it runs.
        name: The trial's name in Tune, or None outside Tune.
        identity: The trial's ID in Tune, or None outside Tune.
    """

    logdir: Path
    name: str | None = None
    identity: str | None = None


class TuneTrial(Protocol):
    """Interface of training that runs as a Ray Tune trial.

    All methods are called in the trial's process, one at a time.
    """

    def step(self) -> TrialStepResult:
        """Train until there is a result to report, or until training ends."""

    def save(self, folder: Path) -> None:
        """Write to a folder everything that `load` needs to continue the training."""

    def load(self, folder: Path) -> None:
        """Continue the training from the files that `save` wrote, in this process or another process."""

    def end(self) -> None:
        """End the training and free its resources. A second call does nothing."""


def require_tune(purpose: str) -> Any:
    """Import and return the module `ray.tune`.

    Args:
        purpose: What needs Ray Tune, for the error message.

    Raises:
        MissingTuneError: Ray Tune or one of its dependencies is not installed.
    """
    try:
        return require("ray.tune", extra="tune", purpose=purpose)
    except ImportError as error:
        raise MissingTuneError(str(error)) from error


def reservation(bundles: Bundles, strategy: str = "PACK") -> Any:
    """Return the resources of a trial in the format that Ray Tune expects.

    Args:
        bundles: Resources of the trial's own process, followed by the resources of each of its workers.
        strategy: Placement strategy of Ray, such as "PACK" for as few nodes as possible.
    """
    return require_tune("a trial").PlacementGroupFactory([dict(bundle) for bundle in bundles], strategy=strategy)


def make_trainable(
    make_trial: Callable[[dict[str, Any], TrialInfo], TuneTrial],
    bundles_of: Callable[[dict[str, Any]], Bundles],
    name: str,
    *,
    strategy: str = "PACK",
    purpose: str = "a trial",
) -> type[Any]:
    """Return a trainable class to pass to `tune.Tuner` or `tune.run`.

    Args:
        make_trial: Function that creates a trial's `TuneTrial` in the trial's process. It must be picklable.
        bundles_of: Function that returns the resources for a config: the resources of the trial's own process, followed
            by the resources of each of its workers.
        name: Name of the class, which Tune displays.
        strategy: Placement strategy of Ray, such as "PACK" for as few nodes as possible.
        purpose: What needs Ray Tune, for the error message.

    Raises:
        MissingTuneError: Ray Tune is not installed.
    """
    tune = require_tune(purpose)
    pickle_modules_by_name()
    from ray.tune import result as names

    def as_result(reported: TrialStepResult, last: dict[str, Any] | None) -> dict[str, Any]:
        flags = {} if reported.has_checkpoint is None else {names.SHOULD_CHECKPOINT: reported.has_checkpoint}
        if not reported.is_last:
            return {**(reported.metrics or {}), **flags}
        if reported.metrics is None and not reported.has_checkpoint:
            return {names.RESULT_DUPLICATE: True, names.DONE: True}
        return {**(reported.metrics or last or {}), **flags, names.DONE: True}

    class TrialTrainable(tune.Trainable):  # type: ignore[name-defined]
        """Trainable class that runs a `TuneTrial`."""

        _last: dict[str, Any] | None = None

        def setup(self, config: dict[str, Any]) -> None:
            info = TrialInfo(Path(self.logdir), self.trial_name or None, self.trial_id or None)
            self._trial = make_trial(dict(config), info)

        def step(self) -> dict[str, Any]:
            reported = self._trial.step()
            self._last = reported.metrics or self._last
            return as_result(reported, self._last)

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self._trial.save(Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self._trial.load(Path(checkpoint_dir))

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self._last = None
            self._trial.end()  # the actor is reused for another trial, for which `setup` creates a new `TuneTrial`
            self.setup(new_config)
            return True

        def cleanup(self) -> None:
            self._trial.end()

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return reservation(bundles_of(dict(config)), strategy)

        def __repr__(self) -> str:
            return name  # Ray's log shows the actor under this name

    TrialTrainable.__name__ = TrialTrainable.__qualname__ = name
    return TrialTrainable


@functools.cache
def trainer_trainable(purpose: str) -> type[Any]:
    """Return the base class of `BaseTorchTrainable` and `TFTrainable`, which runs a trainer as a Ray Tune trial.

    Args:
        purpose: What needs Ray Tune, for the error message.

    Raises:
        MissingTuneError: Ray Tune is not installed.
    """
    tune = require_tune(purpose)

    class TrainerTrainable(tune.Trainable):  # type: ignore[name-defined]
        """A Ray Tune trial. A subclass creates the trainer. Each step of the trial trains and validates one epoch."""

        _checkpoint_name: ClassVar[str]
        _trainer: Any = None

        def _create_trainer(self, tune_config: dict[str, Any]) -> Any:
            raise NotImplementedError(
                f"`{type(self).__name__}` makes no trainer: override `_create_trainer(self, tune_config)`, and return "
                "one with the trial's config."
            )

        def _reset_trainer(self, tune_config: dict[str, Any]) -> bool:
            """Reset the trainer to the config of another trial, with new operators, and return True.

            Return False if this is not possible. Another trial then needs a new trainer.
            """
            return False

        @property
        def trainer(self) -> Any:
            """This trial's trainer."""
            return self._trainer

        def setup(self, config: dict[str, Any]) -> None:
            """Create the trainer for this trial's config. This starts the workers."""
            self._trainer = self._create_trainer(dict(config))

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Prepare this actor for another trial. Reuse the worker processes if possible.

            Always return True: Ray Tune can use the actor for the new trial.
            """
            if not self._reset_trainer(dict(new_config)):
                self.cleanup()
                self.setup(new_config)
            return True

        def save_checkpoint(self, checkpoint_dir: str) -> str:
            """Save the trainer and the config to the folder, and return the folder, as Ray Tune expects."""
            self._trainer.save(str(Path(checkpoint_dir, self._checkpoint_name)))
            write_config(Path(checkpoint_dir), self.config)
            return checkpoint_dir

        def load_checkpoint(self, checkpoint: str) -> None:
            """Load a checkpoint that `save_checkpoint` wrote.

            If the checkpoint was saved with another config, the optimizers use the values of the current config.
            If you have state outside the trainer, override this method and `save_checkpoint`.

            Args:
                checkpoint: The folder of the checkpoint, or the trainer's file in that folder.
            """
            path = Path(checkpoint)
            file = path / self._checkpoint_name if path.is_dir() else path
            self._trainer.load(str(file))
            if has_changed(file.parent, self.config):
                self._trainer._follow_config()

        def cleanup(self) -> None:
            """Shut down the trainer and its workers at the end of the trial."""
            trainer, self._trainer = self._trainer, None
            if trainer is not None:
                trainer.shutdown()

    return TrainerTrainable


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the values of a config, without keys and passwords, to a file in the folder of a checkpoint."""
    (folder / _CONFIG_FILE).write_text(json.dumps(_comparable(masked(config))), encoding="utf-8")


def has_changed(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint in a folder was written with another config.

    Return False if no config was stored with the checkpoint, or if `folder` is a file.
    """
    try:
        noted = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(noted != _comparable(masked(config)))


def _comparable(value: Any) -> Any:
    """Convert a config value to a form that can be stored as JSON and compared with a stored value.

    An object that JSON cannot express becomes a hash of its pickled bytes.
    """
    if isinstance(value, Mapping):
        return {str(key): _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    plain = value if value is None or isinstance(value, str) else as_number(value)
    if plain is not None or value is None:
        return repr(plain)
    try:
        return hashlib.sha256(packed_bytes("The config", value)).hexdigest()
    except UnpicklableError:
        return math.nan  # NaN differs from every value, even from itself, so the config always counts as changed


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two dicts recursively. Unless both values under a key are dicts, the second value takes precedence."""
    result = dict(first)
    for name, value in second.items():
        before = result.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[name] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result
