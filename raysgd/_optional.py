"""The one place that turns a missing optional dependency into the command that installs it.

A leaf that needs an optional package calls `require` inside the function that uses it. Nothing else in the
package probes for packages, so every user reads the same sentence, and a package that is present but broken
is never mistaken for one that is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
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


def _missing_message(module: str, extra: str, who: str) -> str:
    return f'{who} needs `{_package_of(module)}`, which is not installed. Run: pip install "raysgd[{extra}]"'


def _broken_message(module: str, extra: str, who: str, error: Exception) -> str:
    return (
        f"{who} needs `{module}`. The package `{_package_of(module)}` is installed, but importing it failed "
        f"with {type(error).__name__}: {error}. Repair that installation, or replace it: "
        f'pip install --upgrade --force-reinstall "raysgd[{extra}]"'
    )
