"""Class-based, fault-tolerant training of PyTorch and TensorFlow models on Ray.

Write training code for a single process and choose a number of workers. You get the metrics and steps that one process
would compute with the same global batch. If a worker dies, no finished training is lost. Training continues on the
remaining workers, and new workers join when resources are available.

Ray places the worker processes on machines. PyTorch or TensorFlow computes gradients and exchanges them between
workers. Importing `raysgd` does not import Ray, PyTorch or TensorFlow. Each public name, such as `TorchTrainer`,
imports what it needs on first use.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any, NoReturn

from raysgd.core.imports import lazy_names
from raysgd.core.text import log_lines

lazy_names(__name__)

log_lines.install()


def _check_place() -> None:
    """Check that `raysgd.operators` can be imported, and warn if the operating system is not Linux.

    In a source checkout, `raysgd/operators` is a symlink. Downloaded archives and checkouts on Windows may lack it.

    Raises:
        ImportError: The folder `raysgd/operators` is missing, and `raysgd.operators` is not found elsewhere either.
    """
    if not os.path.isdir(os.path.join(__path__[0], "operators")) and find_spec(f"{__name__}.operators") is None:
        raise ImportError(
            "`raysgd/operators` is no folder: this checkout lacks its link to `operators`. Run `pip install .` in it, "
            "and start your program in another folder."
        )
    if sys.platform != "linux":
        warnings.warn(f"raysgd is tested on Linux only. This is `{sys.platform}`.", RuntimeWarning, stacklevel=3)


_check_place()


def _take_over_aliases() -> None:
    """Redirect this process's imports of `ray.util.sgd` to raysgd, as `compat.install` did in the driver's process."""
    from raysgd.compat import aliases

    aliases.install()


if "RAYSGD_COMPAT" in os.environ:
    _take_over_aliases()


def PyTorchTrainer(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error that says to use `TorchTrainer`, the new name of the `ray.util.sgd` class `PyTorchTrainer`.

    Raises:
        RemovedNameError: Always.
    """
    from raysgd.exceptions import RemovedNameError

    raise RemovedNameError("`raysgd.PyTorchTrainer` was renamed: use `raysgd.TorchTrainer` instead.")
