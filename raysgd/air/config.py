"""Configs of a run: the number of workers, the data, what is kept, and what happens when it fails.

All configs check what they are given when you make them. `ScalingConfig` leaves search spaces of Ray Tune alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from raysgd._arguments.checks import check_runtime_env, is_integer, is_number
from raysgd._numbers.ranking import MAX, MIN
from raysgd._text.secrets import masked
from raysgd.air._dataset_config import DatasetConfig
from raysgd.air._scaling import ScalingConfig
from raysgd.storage import open_folder

__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "FailureConfig",
    "LoggingConfig",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
]


@dataclass
class CheckpointConfig:
    """The rule that says which checkpoints of a run stay in its folder.

    Attributes:
        num_to_keep: How many; None for all. With 0 none is written: the latest one is kept in memory only.
        checkpoint_score_attribute: The metric by which they are judged, as you report it; None for their age. One
            without that metric counts as the worst.
        checkpoint_score_order: Whether "max" or "min" of it is best.
        checkpoint_frequency: For trainers that save by themselves; a function decides for itself, so only 0 is allowed.
        checkpoint_at_end: Also for trainers that save by themselves.

    Raises:
        ValueError: A value that cannot be.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = MAX
    checkpoint_frequency: int | None = 0
    checkpoint_at_end: bool | None = None

    def __post_init__(self) -> None:
        _check_count("num_to_keep", self.num_to_keep, "None, for all of them, or 0 or more")
        _check_count("checkpoint_frequency", self.checkpoint_frequency, "0 or more")
        if self.checkpoint_score_attribute is not None and not isinstance(self.checkpoint_score_attribute, str):
            raise ValueError(
                f"`checkpoint_score_attribute={self.checkpoint_score_attribute!r}`: need the name of a metric, or None."
            )
        if self.checkpoint_score_order not in (MAX, MIN):
            raise ValueError(
                f'`checkpoint_score_order={self.checkpoint_score_order!r}`: allowed are "{MAX}" and "{MIN}".'
            )


def _check_count(name: str, value: Any, allowed: str) -> None:
    if value is not None and (not is_integer(value) or value < 0):
        raise ValueError(f"`{name}={value!r}`: need {allowed}.")


@dataclass
class FailureConfig:
    """The rule for failures of a run.

    Attributes:
        max_failures: How often the run is started again, from its last checkpoint; -1 for any number of times. The
            death of a worker counts, and so does an exception of your function. `fit` starts the count again at each
            new checkpoint, until your function raises for the first time.
        fail_fast: For runs of several trials: True ends all of them when one fails, "raise" raises its error at once.
        controller_failure_limit: How often the process that looks after the workers may be started again; -1 for any
            number of times. Here that is your driver, which is not started again.
        max_preemption_failures: None: a worker that is lost with its node counts for `max_failures`.
        relax_collectives_on_preemption: False, as survivors are started again.
        preemption_grace_s: 0, as workers leave a node that is about to go behind their next checkpoint.

    Raises:
        ValueError: A value that cannot be, or is not done here, or both at once.
    """

    max_failures: int = 0
    fail_fast: bool | str = False
    controller_failure_limit: int = -1
    max_preemption_failures: int | None = None
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0

    def __post_init__(self) -> None:
        self._refuse_what_is_not_done()
        if not is_integer(self.max_failures) or self.max_failures < -1:
            raise ValueError(f"`max_failures={self.max_failures!r}`: need 0 or more, or -1 for any number of failures.")
        if not isinstance(self.fail_fast, bool) and self.fail_fast != "raise":
            raise ValueError(f'`fail_fast={self.fail_fast!r}`: allowed are True, False and "raise".')
        if self.fail_fast and self.max_failures != 0:
            raise ValueError(
                f"`max_failures={self.max_failures!r}` and `fail_fast={self.fail_fast!r}` contradict each other: pass "
                "one of them."
            )

    def _refuse_what_is_not_done(self) -> None:
        if not is_integer(self.controller_failure_limit) or self.controller_failure_limit < -1:
            raise ValueError(
                f"`controller_failure_limit={self.controller_failure_limit!r}`: need 0 or more, or -1 for any number."
            )
        for name in ("max_preemption_failures", "relax_collectives_on_preemption", "preemption_grace_s"):
            if (value := getattr(self, name)) not in (None, False, 0):
                raise ValueError(
                    f"`{name}={value!r}`: raysgd leaves nodes that are about to go behind the next checkpoint, and "
                    "counts a worker that is lost before as any other. Leave it out, and pass a `max_failures` that "
                    "has room for these."
                )


@dataclass
class LoggingConfig:
    """The level of the log of a run.

    Attributes:
        log_level: The least level of raysgd's own messages in the driver while the run lasts, such as "WARNING".

    Raises:
        ValueError: There is no such level.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, str) or not isinstance(logging.getLevelName(self.log_level.upper()), int):
            raise ValueError(f'`log_level={self.log_level!r}`: need the name of a level, such as "WARNING".')
        self.log_level = self.log_level.upper()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Holds raysgd's log at this level for a while."""
        own = logging.getLogger("raysgd")
        before = own.level
        own.setLevel(self.log_level)
        try:
            yield
        finally:
            own.setLevel(before)


@dataclass
class SyncConfig:
    """The way of files to the storage. Accepted as the old library had it.

    A run writes to its `storage_path` directly, so nothing is copied at intervals: the other fields than `upload_dir`
    have no effect.

    Attributes:
        upload_dir: The former name of `RunConfig(storage_path=...)`.
        syncer: No effect.
        sync_period: No effect.
        sync_timeout: No effect.
        sync_artifacts: No effect.
        sync_artifacts_on_checkpoint: No effect.
        sync_on_checkpoint: No effect.
    """

    upload_dir: str | None = None
    syncer: Any = "auto"
    sync_period: float = 300
    sync_timeout: float = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    sync_on_checkpoint: bool = True

    def __post_init__(self) -> None:
        _check_place("upload_dir", self.upload_dir)
        for name in ("sync_period", "sync_timeout"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"`{name}={value!r}`: need a number of seconds, 0 or more.")


@dataclass
class RunConfig:
    """The place where a run writes, what it keeps, and when it stops.

    Attributes:
        name: The name of the run's folder; None for the trainer's class and the time.
        storage_path: The folder or the URI that gets the run's folder; None for `~/ray_results`.
        storage_filesystem: A `pyarrow.fs.FileSystem`, for which `storage_path` is a path.
        failure_config: What happens when the run fails.
        checkpoint_config: Which checkpoints stay.
        sync_config: Accepted as the old library had it.
        verbose: How much is shown: 0 for nothing, 3 for most.
        stop: When the run stops, beside the end of your function: a dict of metrics and the values at which it stops,
            or a function that gets the trial's id and the metrics and returns True.
        callbacks: Callbacks of Ray Tune, such as loggers.
        progress_reporter: A reporter of Ray Tune.
        log_to_file: Whether what the workers print goes to files in the trial's folder: True, a file name, or two, for
            standard output and for errors.
        local_dir: The former name of `storage_path`. It is None again once it was taken over.
        worker_runtime_env: The environment of the workers' processes, as Ray takes it; None for that of the job. It
            does not reach this process.
        logging_config: What the log says while the run lasts; None to leave the log alone.

    Raises:
        ValueError: A value that cannot be, or two folders.
        TypeError: Something else than the config of that name.
        ModuleNotFoundError: A package that the URI needs is missing.
    """

    name: str | None = None
    storage_path: str | Path | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig = None  # type: ignore[assignment]  # never None once it is made
    checkpoint_config: CheckpointConfig = None  # type: ignore[assignment]
    sync_config: SyncConfig = None  # type: ignore[assignment]
    verbose: int | None = None
    stop: Mapping[str, Any] | Callable[[str, Any], bool] | Sequence[Any] | None = None
    callbacks: list[Any] | None = None
    progress_reporter: Any = None
    log_to_file: bool | str | tuple[str, str] = False
    local_dir: str | Path | None = field(default=None, repr=False)
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig | None = None

    def __post_init__(self) -> None:
        self.failure_config = checked_config("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = checked_config("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        self.sync_config = checked_config("sync_config", self.sync_config, SyncConfig)
        if self.logging_config is not None:
            checked_config("logging_config", self.logging_config, LoggingConfig)
        self._take_over_place()
        self._check()

    def __repr__(self) -> str:
        """The config without the keys of its storage."""
        shown = {each.name: masked(getattr(self, each.name)) for each in fields(self) if each.repr}
        return masked(f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})")

    def _take_over_place(self) -> None:
        """Makes one folder of its three names."""
        _check_place("storage_path", self.storage_path)
        _check_place("local_dir", self.local_dir)
        if self.local_dir is not None and self.storage_path not in (None, self.local_dir):
            raise ValueError(
                f"`storage_path={masked(str(self.storage_path))!r}` and `local_dir={masked(str(self.local_dir))!r}`: "
                "these are two names of one option. Pass `storage_path`."
            )
        self.storage_path = self.storage_path or self.sync_config.upload_dir or self.local_dir
        self.local_dir = None
        if self.storage_path is not None:
            open_folder(self.storage_path, self.storage_filesystem, argument="storage_path")

    def _check(self) -> None:
        if self.name is not None and not _is_name(self.name):
            raise ValueError(
                f"`name={self.name!r}`: need the name of a folder, without slashes, or None. `storage_path` says where "
                "it is."
            )
        if self.verbose is not None and not is_integer(self.verbose):
            raise ValueError(f"`verbose={self.verbose!r}`: need 0, 1, 2 or 3, or None.")
        if self.callbacks is not None and not isinstance(self.callbacks, list | tuple):
            raise TypeError(f"`callbacks={self.callbacks!r}`: need a list of callbacks, or None.")
        check_runtime_env("worker_runtime_env", self.worker_runtime_env)
        is_stop = self.stop is None or callable(self.stop) or isinstance(self.stop, Mapping | list | tuple)
        if not is_stop:
            raise TypeError(
                f'`stop={self.stop!r}`: need a dict such as `{{"training_iteration": 10}}`, a function of the '
                "trial's id and its metrics, or None."
            )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.strip() not in ("", ".", "..") and not {"/", "\0"} & {*name}


def checked_config(name: str, value: Any, config_class: type[Any]) -> Any:
    """A config; a new one where none was given.

    Raises:
        ValueError: It is of another class.
    """
    if value is None:
        return config_class()
    if not isinstance(value, config_class):
        raise ValueError(
            f"`{name}={value!r}`: need a `{config_class.__name__}`, or None. Those of Ray have the same names, but are "
            "other classes: import it from `raysgd.train`."
        )
    return value


def _check_place(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value)):
        raise ValueError(f"`{name}={value!r}`: need a folder or a URI, as a `str` or a `pathlib.Path`, or None.")
