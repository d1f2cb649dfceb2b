"""`install`, which lets programs written for `ray.util.sgd` run unchanged, and the alias modules that they import.

An alias is a module object under an old name. It copies nothing: reading or setting an attribute of the alias reads or
sets it on raysgd's module. Ray's own `ray.util.sgd`, which raises an error on import, is never executed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from raysgd.compat.paths import Paths

VARIABLE = "RAYSGD_COMPAT"
"""Environment variable that tells worker processes that the driver called `install`."""
_OLD = ("ray.util.sgd", "ray.experimental.sgd")
"""The old packages to redirect. Ray still has the first package, but importing it raises an error."""


class Alias(ModuleType):
    """Makes a module available under another name.

    Args:
        name: The old module name, which a program imports.
        target: The raysgd module whose attributes the program gets.
    """

    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, target.__doc__)
        vars(self).update(_raysgd_target=target, __path__=[])
        if not hasattr(target, "__all__"):
            vars(self)["__all__"] = [each for each in dir(target) if not each.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        target: ModuleType = vars(self)["_raysgd_target"]
        try:
            return getattr(target, name)
        except AttributeError:
            if hasattr(target, "__path__") and importlib.util.find_spec(f"{target.__name__}.{name}") is not None:
                return importlib.import_module(f"{target.__name__}.{name}")  # not yet imported in this process
            place = None if name.startswith("_") else Paths().find(f"{vars(self)['__name__']}.{name}")
            if place is None or place.new == f"{target.__name__}.{name}":
                raise
            if place.new is not None:
                return getattr(importlib.import_module(place.module), place.new.rpartition(".")[2])
            raise AttributeError(f"`{place.old}` has no successor in raysgd: {place.reason}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) or name.startswith("__"):  # Python's import system sets these on the alias
            vars(self)[name] = value
        else:
            setattr(vars(self)["_raysgd_target"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_raysgd_target"], name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_raysgd_target"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an alias so that other processes can load it without `install`."""
        return _alias_there, (vars(self)["__name__"], vars(self)["_raysgd_target"].__name__)


def _alias_there(name: str, target: str) -> Alias:
    return Alias(name, importlib.import_module(target))


class _OldNames(MetaPathFinder, Loader):
    """Import hook that redirects `ray.util.sgd` and other modules that Ray no longer has to raysgd's modules."""

    def __init__(self) -> None:
        self._paths = Paths()
        self._modules = dict(self._paths.modules())

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname in self._modules:
            return ModuleSpec(fullname, self, is_package=True)
        is_old = fullname.startswith(_OLD) or fullname.rpartition(".")[0] in self._modules
        gone = self._paths.find(fullname) if is_old else None
        if gone is not None and gone.new is None:  # a `from` import would drop the message of a `ModuleNotFoundError`
            raise ImportError(f"`{fullname}` has no successor in raysgd: {gone.reason}", name=fullname)
        if self._paths.is_package(fullname) and not _is_rays(fullname):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._modules.get(spec.name)
        return ModuleType(spec.name) if new is None else Alias(spec.name, importlib.import_module(new))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module has already been imported."""


def _is_rays(name: str) -> bool:
    """Return True if Ray itself has a package or module with this name."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        return True
    found = sys.modules.get(parent) or importlib.import_module(parent)
    places = [Path(folder) / name.rpartition(".")[2] for folder in getattr(found, "__path__", ())]
    return any((place / "__init__.py").exists() or place.with_suffix(".py").exists() for place in places)


def install() -> None:
    """Redirect imports of `ray.util.sgd`, and of other modules that Ray no longer has, to raysgd.

    This also applies to workers. Call it before Ray starts, so that the worker processes inherit the setting. On a
    cluster that is already running, pass `runtime_env={"worker_process_setup_hook": "raysgd.compat.install"}` to
    `ray.init`.
    """
    os.environ[VARIABLE] = "1"
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
