"""Continues a run in a new process: `trainer.pkl`, `can_restore` and `restore`.

`fit` writes the trainer's class and arguments to the experiment's folder. Of the datasets, only the names are saved,
because the data may be large or belong to a cluster that no longer exists.

Loading `trainer.pkl` runs code, as with any pickle. Restore only from folders that you trust.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig
from raysgd.air.trial import FitTrialView, TrialFolder
from raysgd.core.imports import pickle_modules_by_name
from raysgd.core.text.secrets import has_secret, masked
from raysgd.storage import Folder, open_folder
from raysgd.train.fit.recorder import RUN_FILE, pickled

logger = logging.getLogger(__name__)

TRAINER_FILE = "trainer.pkl"
SWEEP_FILE = "swept_trainer.pkl"
"""Takes the place of `trainer.pkl` in a Tune sweep. Only `Tuner.restore` can continue the sweep, not the trainer's
`restore`."""
_RUN_CONFIG_EXTRAS = ("callbacks", "progress_reporter", "stop")


@dataclass(frozen=True)
class _CheckpointAt:
    """The location of a checkpoint. It replaces the checkpoint in `trainer.pkl`.

    The checkpoint itself may be large, and its URI may contain keys.
    """

    path: str


@dataclass(frozen=True)
class _WithoutSecrets:
    """Placeholder in `trainer.pkl` for a `train_loop_config` that contains keys or passwords.

    The user must pass the config to `restore` again.
    """

    shown: Any


# -------------------------------------------------------------------------------------------------------------- writing


def save_trainer(
    experiment: Folder, trainer_class: type, arguments: Mapping[str, Any], file: str = TRAINER_FILE
) -> None:
    """Write the class and the arguments of a trainer to an experiment's folder, for `restore`.

    If they cannot be pickled, write nothing and log a warning.

    Args:
        experiment: The experiment's folder.
        trainer_class: The trainer's class.
        arguments: The arguments that the user passed to the class.
        file: Name of the file to write.
    """
    kept = {name: _for_later(name, value) for name, value in arguments.items()}
    pickle_modules_by_name()
    content, reason = pickled((trainer_class, kept))
    if content is None:
        logger.warning(
            "this run continues, but cannot be restored, because the trainer's arguments cannot be pickled: %s", reason
        )
        return
    experiment.make()
    experiment.write(file, content)


def _for_later(name: str, value: Any) -> Any:
    if name == "datasets" and isinstance(value, Mapping):
        return dict.fromkeys(value)
    if name == "train_loop_config" and (shown := masked(value)) is not value:
        return _WithoutSecrets(shown)
    if isinstance(value, RunConfig):
        return _for_restore(value)
    if isinstance(value, Checkpoint) and value.uri is not None:
        if value.get_internal_representation()[0] == "local_path":
            return _CheckpointAt(value.path)
        if has_secret(value.uri):
            return _CheckpointAt(masked(value.uri))
    return value


def _for_restore(run_config: RunConfig) -> RunConfig:
    """Return a `RunConfig` without values that cannot be pickled, and without the storage.

    The URI or file system of the storage may contain keys. `restore` sets the storage again.
    """
    lost: dict[str, Any] = {"storage_path": None, "storage_filesystem": None}
    for name in _RUN_CONFIG_EXTRAS:
        content, reason = pickled(getattr(run_config, name))
        if content is None:
            lost[name] = None
            logger.warning(
                "a restored run will not have `RunConfig(%s=...)`, because its value cannot be pickled: %s",
                name,
                reason,
            )
    return replace(run_config, **lost)


# -------------------------------------------------------------------------------------------------------------- reading


def can_restore(path: str | Path, storage_filesystem: Any = None) -> bool:
    """Return True if this folder contains a run that `restore` can continue.

    Args:
        path: The experiment's folder, or its URI.
        storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.

    Raises:
        StorageError: The storage cannot be reached.
    """
    return open_folder(path, storage_filesystem).has(TRAINER_FILE)


def restore(
    trainer_class: type | None,
    path: str | Path,
    storage_filesystem: Any = None,
    *,
    saved_as: str = TRAINER_FILE,
    **replaced: Any,
) -> tuple[Any, TrialFolder | None]:
    """Recreate the trainer of a run, or of a sweep of Ray Tune, from the file in the experiment's folder.

    Args:
        trainer_class: The class that `restore` was called on; None for the saved class.
        path: The experiment's folder, or its URI.
        storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.
        saved_as: Name of the file that contains the trainer.
        **replaced: Arguments to use instead of the saved arguments. None leaves an argument unchanged.

    Returns:
        The trainer, and the folder of the trial that its `fit` continues. The folder is None if `fit` must start a new
        trial, because the run had not started or its `run.json` is damaged.

    Raises:
        ValueError: The folder contains no run, its file is damaged, the names of the datasets differ, a config with
            secrets was not passed again, or `trainer_class` cannot be created with these arguments.
        StorageError: The storage cannot be reached.
    """
    experiment = open_folder(path, storage_filesystem)
    saved_class, arguments = _load(experiment, path, saved_as)
    arguments = _complete(arguments, {name: value for name, value in replaced.items() if value is not None})
    arguments["run_config"] = at_place(arguments.get("run_config"), path, storage_filesystem)
    return _made(trainer_class or saved_class, saved_class, arguments), _trial_in(experiment)


def _load(experiment: Folder, path: str | Path, file: str) -> tuple[type, dict[str, Any]]:
    if not experiment.has(file):
        raise ValueError(
            f"`path={masked(str(path))!r}`: there is no run to restore, because there is no `{file}`. Pass the "
            f"folder with the run's name, in which `fit` made the folder of the trial.{_better_place(path)}"
        )
    content = experiment.read(file)
    try:
        saved_class, arguments = pickle.loads(content)
        return saved_class, dict(arguments)
    except Exception as error:  # user classes may raise anything
        raise ValueError(
            f"`path={masked(str(path))!r}`: `{file}` cannot be read: {type(error).__name__}: "
            f"{masked(str(error))}. If it names a module that has moved, make that importable; "
            "if the file is damaged, make a new trainer with "
            "`resume_from_checkpoint`."
        ) from error


def _better_place(path: str | Path) -> str:
    """Return a hint for an error message: the folder that the user probably meant, or an empty string.

    There is a hint if `path` is the folder of a trial or checkpoint, or the parent of a run's folder.
    """
    place = Path(str(path)).expanduser()
    near = [*place.parents[:2], *sorted(file.parent for file in place.glob(f"*/{TRAINER_FILE}"))]
    for folder in near:
        if (folder / TRAINER_FILE).is_file():
            return f" Did you mean {str(folder)!r}?"
    return ""


def _complete(arguments: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's saved arguments, updated with the arguments that the user passed to `restore`.

    Raises:
        ValueError: The names of the datasets differ, or a config with secrets was not passed again.
    """
    saved = set(arguments.get("datasets") or {})
    passed = set(replaced.get("datasets") or {})
    if saved != passed:
        raise ValueError(
            f"`datasets`: the run had {sorted(saved) or 'none'}, and `restore` was given {sorted(passed) or 'none'}. "
            "Datasets are not saved with a run: pass all of them again, under the same names."
        )
    complete = dict[str, Any]()
    for name, value in {**arguments, **replaced}.items():
        if isinstance(value, _WithoutSecrets):
            raise ValueError(
                f"`{name}` was {value.shown!r}: keys and passwords are not saved with a run. Pass the whole value "
                "again, or give keys to the function in the environment."
            )
        if isinstance(value, _CheckpointAt) and not Path(value.path).is_dir():
            words = "`%s` was in %s and cannot be opened. Pass it again if the run has no checkpoint yet"
            logger.warning(words, name, value.path)
        else:
            is_place = isinstance(value, _CheckpointAt)
            complete[name] = Checkpoint.from_directory(value.path) if is_place else value
    return complete


def at_place(run_config: RunConfig | None, path: str | Path, filesystem: Any) -> RunConfig:
    """Return a copy of a `RunConfig` for a run whose folder is now at `path`. The folder may have been moved."""
    name, above = open_folder(path, filesystem).name, _above(str(path))
    return replace(run_config or RunConfig(), name=name, storage_path=above, storage_filesystem=filesystem)


def _above(path: str) -> str:
    """Return the path or URI of the parent folder.

    >>> _above("s3://bucket/results/run/?region=us-east-1"), _above("/results/run"), _above("run")
    ('s3://bucket/results?region=us-east-1', '/results', '.')
    """
    place, mark, options = path.partition("?") if "://" in path else (path, "", "")
    above, slash, _ = place.rstrip("/").rpartition("/")
    return f"{above or slash or '.'}{mark}{options}"


def _made(trainer_class: type, saved_class: type, arguments: Mapping[str, Any]) -> Any:
    is_same = _name_of(saved_class) == _name_of(trainer_class)
    if not is_same:
        warnings.warn(
            f"Invalid trainer type. This run was made by `{saved_class.__name__}`, and is restored as "
            f"`{trainer_class.__name__}`: call `restore` on the class that made it.",
            stacklevel=5,
        )
    try:
        return trainer_class(**arguments)
    except (TypeError, ValueError) as error:
        if is_same:
            raise
        raise ValueError(
            f"Invalid trainer type: `{trainer_class.__name__}` cannot be made with the arguments of "
            f"`{saved_class.__name__}`: {error}"
        ) from error


def _name_of(trainer_class: type) -> tuple[str, str]:
    return trainer_class.__module__, trainer_class.__qualname__


def _trial_in(experiment: Folder) -> TrialFolder | None:
    if not experiment.has(RUN_FILE):
        return None
    try:
        note = json.loads(experiment.read(RUN_FILE))
        return TrialFolder(experiment, str(note["trial"]), is_finished=note.get("status") == FitTrialView.TERMINATED)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s in %s is damaged, so a new trial is started: %s", RUN_FILE, experiment, error)
        return None
