"""Public names whose modules are imported when the names are first used.

Why Ray and the frameworks are imported late: ADR 8.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package, whose public modules are imported when they are first used too.

    Args:
        package: Its `__name__`.
        modules: For each name the module that defines it; `module:name` where that has another name there.
    """

    def submodules() -> set[str]:
        path = getattr(sys.modules[package], "__path__", ())
        return {each.name for each in pkgutil.iter_modules(path) if not each.name.startswith("_")}

    def find(name: str) -> Any:
        if name not in modules:
            if not name.startswith("_") and name in submodules():
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        module, _, name_there = modules[name].partition(":")
        value = getattr(importlib.import_module(module), name_there or name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *submodules()})

    return find, names
