"""Says how to install a package of a vendor, which is not an extra of this distribution."""

from __future__ import annotations

import importlib
from types import ModuleType


def require_package(module: str, package: str, purpose: str) -> ModuleType:
    """Imports a package.

    Args:
        module: What it is imported as.
        package: What it is installed as.
        purpose: What needs it.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs `{module}`, which is not installed. Run: pip install {package}", name=module
        ) from error
