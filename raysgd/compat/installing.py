"""`install`, with which programs for the old library run unchanged: what they import leads to this library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raysgd.compat.aliases import add_finder
from raysgd.compat.own_imports import redirect

VARIABLE = "RAYSGD_COMPAT"
"""Tells worker processes what `install` was told: `sgd`, or `train:` and the folder of the program."""


def install(ray_train: bool = False, folder: str | Path | None = None) -> None:
    """Makes imports of `ray.util.sgd`, and of what else Ray has no longer, lead to raysgd; in workers too.

    Call it before Ray is started, so that the worker processes inherit it. On a cluster that runs already pass
    `runtime_env={"worker_process_setup_hook": "raysgd.compat.install"}` to `ray.init`.

    Args:
        ray_train: Whether `ray.train` and `ray.air`, too, mean the old library, where the program itself and the
            modules in its folder import them. Ray's own modules keep Ray's.
        folder: The folder of the program; by default that of the running script, or else the current one.

    Raises:
        TypeError: `ray_train` is not a bool.
    """
    if not isinstance(ray_train, bool):
        raise TypeError(f"`ray_train` has to be True or False, not `{ray_train!r}`.")
    own = Path(folder or _folder_of_script()).resolve()
    os.environ[VARIABLE] = f"train:{own}" if ray_train else "sgd"
    add_finder()
    redirect(own, ray_train)


def install_from_environment() -> None:
    """The same in a worker process, as the driver's process did it."""
    kind, _, folder = os.environ[VARIABLE].partition(":")
    install(kind == "train", folder or None)


def _folder_of_script() -> Path:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).parent if file else Path.cwd()
