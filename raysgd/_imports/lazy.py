"""Public names whose modules are imported when the names are first used.

Why Ray and the frameworks are imported late: ADR 8.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str], shown: Iterable[str] | None = None) -> Callable[[str], Any]:
    """Gives a package a `__getattr__`, which imports its names and public modules when they are first used.

    It also gets a `__dir__` of its public names. Type checkers see neither, and so find a name that is misspelled.

    Args:
        package: Its `__name__`.
        modules: For each name the module that defines it; `module:name` where that has another name there.
        shown: The modules of the package that `dir` names. Default: all without an underscore.

    Returns:
        The `__getattr__`.
    """
    namespace = vars(sys.modules[package])

    def submodules() -> set[str]:
        path = namespace.get("__path__", ())
        return {each.name for each in pkgutil.iter_modules(path) if not each.name.startswith("_")}

    def find(name: str) -> Any:
        if name not in modules:
            if not name.startswith("_") and name in submodules():
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        module, _, name_there = modules[name].partition(":")
        value = namespace[name] = getattr(importlib.import_module(module), name_there or name)
        return value

    def names() -> list[str]:
        return sorted({*namespace.get("__all__", namespace), *modules, *(submodules() if shown is None else shown)})

    namespace.update(__getattr__=find, __dir__=names)
    return find
