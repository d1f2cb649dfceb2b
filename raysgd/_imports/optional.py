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


def install_command(extra: str, *options: str) -> str:
    """The command that installs what an extra installs, wherever this package came from.

    It names the packages, so no index needs to have raysgd. Sources that are not installed are named by their folder.
    """
    wanted = _requirements(extra) or [f"{Path(__file__).resolve().parents[2]}[{extra}]"]
    return " ".join(["pip install", *options, *(f'"{each}"' for each in wanted)])


def _requirements(extra: str) -> list[str]:
    """Return what an extra of the installed raysgd installs beside raysgd; nothing if that is not installed."""
    lines = [line.partition(";") for line in _declared()]
    mark = re.compile(rf"""extra == ["']{extra}["']""")
    named = [name.strip() for name, _, marker in lines if mark.search(marker)]
    return [each for name in named for each in _without_own_extras(name)]


def _without_own_extras(requirement: str) -> list[str]:
    own = re.fullmatch(r"raysgd\[(\w+)\]", requirement)
    return _requirements(own[1]) if own else [requirement]


def _declared() -> list[str]:
    """All that the installed raysgd declares to need."""
    try:
        return metadata.requires("raysgd") or []
    except metadata.PackageNotFoundError:
        return []


def _missing_message(module: str, extra: str, who: str) -> str:
    return f"{who} needs `{_package_of(module)}`, which is not installed. Run: {install_command(extra)}"


def _broken_message(module: str, extra: str, who: str, error: Exception) -> str:
    return (
        f"{who} needs `{module}`. The package `{_package_of(module)}` is installed, but importing it failed "
        f"with {type(error).__name__}: {error}. Repair that installation, or run: "
        f"{install_command(extra, '--upgrade', '--force-reinstall')}"
    )
