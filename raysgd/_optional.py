"""The one place that turns a missing optional dependency into the command that installs it.

A leaf that needs an optional package calls `require` inside the function that uses it. Nothing else in the
package probes for packages, so every user reads the same sentence, and a package that is present but broken
is never mistaken for one that is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType


def require(module: str, extra: str, purpose: str | None = None) -> ModuleType:
    """Import an optional dependency, or say how to install it.

    >>> require("json", extra="data").loads("[1, 2]")
    [1, 2]

    Args:
        module: Absolute dotted name of the module to import, for example `"mlflow.tracking"`.
        extra: The extra of this distribution that installs the package.
        purpose: What needs it, as the subject of a sentence, for example `` "`MLflowLogger`" ``. Default:
            `"this feature"`.

    Returns:
        The imported module (for a dotted name the innermost one).

    Raises:
        ModuleNotFoundError: If the package is missing; an `ImportError` too.
        ImportError: If it is present and its import fails. The original error is chained.
    """
    who = purpose or "this feature"
    try:
        return importlib.import_module(module)
    except Exception as error:
        if _is_missing(module, error):
            raise ModuleNotFoundError(_missing_message(module, extra, who), name=module) from error
        raise ImportError(_broken_message(module, extra, who, error), name=module) from error


def require_installed(module: str, extra: str, purpose: str) -> None:
    """Say how to install an optional dependency unless it is there, without importing it, which may take seconds.

    >>> require_installed("json", extra="data", purpose="this example")

    Raises:
        ModuleNotFoundError: If the package is missing.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(_missing_message(module, extra, purpose), name=module)


def _is_missing(module: str, error: Exception) -> bool:
    """Tell a package that is not there from one whose own import went wrong."""
    return isinstance(error, ModuleNotFoundError) and error.name == _package_of(module)


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def install_command(extra: str) -> str:
    """The command that installs an extra, wherever this package came from.

    pip takes the extra of the raysgd that is installed, so no index needs to have raysgd. Sources that are only on
    `PYTHONPATH` are named by their folder.
    """
    return f'pip install "{_source()}[{extra}]"'


def _reinstall_command(extra: str) -> str:
    """The same for packages that are there, but broken or too old: raysgd itself is not fetched again."""
    packages = " ".join(f'"{requirement}"' for requirement in _requirements(extra))
    return f"pip install --upgrade --force-reinstall {packages}" if packages else install_command(extra)


def _source() -> str:
    return "raysgd" if _declared() is not None else str(Path(__file__).resolve().parents[1])


def _requirements(extra: str) -> list[str]:
    """What an extra of the installed raysgd installs beside raysgd."""
    lines = [line.partition(";") for line in _declared() or []]
    mark = re.compile(rf"""extra == ["']{extra}["']""")
    return [name.strip() for name, _, marker in lines if mark.search(marker) and not name.startswith("raysgd[")]


def _declared() -> list[str] | None:
    """All that the installed raysgd declares to need; None if it is not installed."""
    try:
        return metadata.requires("raysgd") or []
    except metadata.PackageNotFoundError:
        return None


def _missing_message(module: str, extra: str, who: str) -> str:
    return f"{who} needs `{_package_of(module)}`, which is not installed. Run: {install_command(extra)}"


def _broken_message(module: str, extra: str, who: str, error: Exception) -> str:
    return (
        f"{who} needs `{module}`. The package `{_package_of(module)}` is installed, but importing it failed "
        f"with {type(error).__name__}: {error}. Repair that installation, or install again what "
        f"`raysgd[{extra}]` needs: {_reinstall_command(extra)}"
    )
