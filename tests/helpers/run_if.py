"""Conditions under which a test runs, each with the reason that a skip prints."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence

import pytest


def RunIf(
    *,
    cuda: bool = False,
    min_gpus: int = 0,
    min_python: tuple[int, int] | None = None,
    modules: Sequence[str] = (),
    programs: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Skip a test unless everything asked for is there.

    Args:
        cuda: Needs PyTorch to see at least one GPU.
        min_gpus: Needs PyTorch to see at least so many.
        min_python: Needs this version of Python or a later one.
        modules: Needs these packages to be installed, by the names they are imported with.
        programs: Needs these commands.
    """
    missing = missing_requirements(
        cuda=cuda, min_gpus=min_gpus, min_python=min_python, modules=modules, programs=programs
    )
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def missing_requirements(
    *,
    cuda: bool = False,
    min_gpus: int = 0,
    min_python: tuple[int, int] | None = None,
    modules: Sequence[str] = (),
    programs: Sequence[str] = (),
) -> list[str]:
    """Name what is asked for and not there; the arguments are those of `RunIf`."""
    num_gpus_needed = max(min_gpus, int(cuda))
    missing = []
    if min_python is not None and sys.version_info[:2] < min_python:
        missing.append("Python {}.{} or later".format(*min_python))
    if num_gpus_needed and num_gpus() < num_gpus_needed:
        missing.append(f"{num_gpus_needed} GPU(s) with CUDA, sees {num_gpus()}")
    missing += [f"package `{module}`" for module in modules if not _is_installed(module)]
    missing += [f"program `{program}`" for program in programs if shutil.which(program) is None]
    return missing


def _is_installed(module: str) -> bool:
    package, _, rest = module.partition(".")
    return importlib.util.find_spec(package) is not None and (not rest or importlib.util.find_spec(module) is not None)


def num_gpus() -> int:
    """Count the GPUs that PyTorch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
