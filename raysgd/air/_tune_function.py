"""Functions of `raysgd.train` in a function that Ray Tune runs itself as a trial, as programs for Ray AIR call them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.air.checkpoint import Checkpoint


def tune_here() -> Any:
    """Return `ray.tune` in the process of such a trial; None elsewhere. Ray keeps this question private."""
    trials = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    is_in_trial = getattr(trials, "_in_tune_session", None)
    return sys.modules.get("ray.tune") if is_in_trial is not None and is_in_trial() else None


def report_to(tune: Any, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
    """Hand a report to the trial, which stores the files of a checkpoint before this returns."""
    if checkpoint is None:
        tune.report(dict(metrics))
        return
    with checkpoint.as_directory() as folder:
        tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))


def checkpoint_of(tune: Any) -> Checkpoint | None:
    """Return what the trial goes on from."""
    from raysgd.air.checkpoint import Checkpoint  # not for every function: it loads what reads stores

    found = tune.get_checkpoint()
    return Checkpoint(found.path, found.filesystem) if found is not None else None
