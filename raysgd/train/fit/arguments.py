"""Checks of the arguments of trainers with `fit`, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from raysgd._arguments import did_you_mean
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.checkpoint import checked_metadata as checked_dict
from raysgd.air.config import RunConfig, ScalingConfig, checked_config
from raysgd.storage import Folder

_ADVICE = "Those of Ray have the same names, but are other classes: import it from `raysgd.train`."


def checked_scaling(value: Any) -> ScalingConfig:
    """See `checked_config`; a dict of its fields will do.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, Mapping):
        return changed_scaling(ScalingConfig(), value)
    config: ScalingConfig = checked_config("scaling_config", value, ScalingConfig)
    return config


def changed_scaling(before: ScalingConfig, values: Mapping[str, Any]) -> ScalingConfig:
    """A config with some values changed.

    Raises:
        ValueError: There is no such field, or the value cannot be.
    """
    known = [each.name for each in fields(ScalingConfig)]
    for name in values:
        if name not in known:
            raise ValueError(
                f"`scaling_config={dict(values)!r}`: `{name}` is unknown.{did_you_mean(name, known)} The names are "
                f"{', '.join(known)}."
            )
    return replace(before, **values)


def checked_resume(value: Any) -> Checkpoint | None:
    """Return what a run starts from.

    Raises:
        ValueError: It is no checkpoint.
    """
    if value is None or isinstance(value, Checkpoint):
        return value
    is_raw = isinstance(value, Mapping | str) or hasattr(value, "__fspath__")
    hint = "`Checkpoint.from_dict(...)` or `Checkpoint.from_directory(...)` makes one. " if is_raw else ""
    raise ValueError(f"`resume_from_checkpoint={value!r:.200}`: need a `Checkpoint`, or None. {hint}{_ADVICE}")


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """Return what each checkpoint says of itself, as it is after a detour through JSON.

    Raises:
        TypeError: It is no dict.
        ValueError: JSON cannot hold it.
    """
    through_json: dict[str, Any] = {} if metadata is None else json.loads(json.dumps(dict(checked_dict(metadata))))
    return through_json


def check_allowed(scaling: ScalingConfig, allowed: Sequence[str], trainer_name: str) -> None:
    """Checks that a config sets nothing that a trainer has no use for, and a number of workers where it needs one.

    Raises:
        ValueError: It does.
    """
    forbidden = [name for name in own_values(scaling) if name not in allowed]
    if forbidden:
        raise ValueError(
            f"`scaling_config` sets {', '.join(f'`{name}`' for name in forbidden)}, which `{trainer_name}` does not "
            f"use: it takes {', '.join(f'`{name}`' for name in allowed)}."
        )


def own_values(config: ScalingConfig) -> dict[str, Any]:
    """Return what a config says that others do not say by themselves."""
    default = ScalingConfig()
    names = [each.name for each in fields(config)]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def check_is_left_to_function(run_config: RunConfig) -> None:
    """Checks that checkpoints are left to the function.

    Raises:
        ValueError: `checkpoint_frequency` or `checkpoint_at_end` is set.
    """
    for name in ("checkpoint_frequency", "checkpoint_at_end"):
        value = getattr(run_config.checkpoint_config, name)
        if value:
            raise ValueError(
                f"`CheckpointConfig({name}={value!r})`: your function decides when to save, with "
                "`report(metrics, checkpoint=...)`. Leave it out."
            )


def check_is_shared(folder: Folder) -> None:
    """Checks that workers can write where the run writes.

    Raises:
        ValueError: Only this process sees that storage.
    """
    if folder.is_in_memory:
        raise ValueError(
            f"`storage_path={str(folder)!r}`: only this process sees its memory, and the workers of `fit` "
            "write checkpoints themselves. Pass a folder, or a URI such as `s3://bucket/folder`."
        )
