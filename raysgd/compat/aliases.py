"""Defines `install`, which lets programs written for `ray.util.sgd` run unchanged by redirecting their imports.

A program that imports an old module, such as `ray.util.sgd.torch`, gets an alias: a module object with the old name
that stands for a module of raysgd. Reading or setting an attribute of the alias reads or sets the attribute of raysgd's
module. Ray's own `ray.util.sgd`, which raises an error when it is imported, is never executed.
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
"""Name of the environment variable that `install` sets. Worker processes with this variable call `install`, too."""
_OLD = ("ray.util.sgd", "ray.experimental.sgd")
"""The packages whose imports are redirected. Ray still has the first package, but importing it raises an error."""


class Alias(ModuleType):
    """A module object with an old name. It stands for a module of raysgd.

    Args:
        name: The old name of the module, which a program imports.
        target: The module of raysgd whose attributes the program gets.
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
        # Python's import system sets submodules and names such as `__spec__`. These belong to the alias itself.
        if isinstance(value, ModuleType) or name.startswith("__"):
            vars(self)[name] = value
        else:
            setattr(vars(self)["_raysgd_target"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_raysgd_target"], name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_raysgd_target"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the alias so that a process that did not call `install` can unpickle it."""
        return _alias_there, (vars(self)["__name__"], vars(self)["_raysgd_target"].__name__)


def _alias_there(name: str, target: str) -> Alias:
    return Alias(name, importlib.import_module(target))


class _OldNames(MetaPathFinder, Loader):
    """Import hook that redirects imports of `ray.util.sgd`, and of other modules that Ray no longer has, to raysgd."""

    def __init__(self) -> None:
        self._paths = Paths()
        self._modules = dict(self._paths.modules())

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname in self._modules:
            return ModuleSpec(fullname, self, is_package=True)
        is_old = fullname.startswith(_OLD) or fullname.rpartition(".")[0] in self._modules
        gone = self._paths.find(fullname) if is_old else None
        # Raise a plain `ImportError`: a `from` import would drop the message of a `ModuleNotFoundError`.
        if gone is not None and gone.new is None:
            raise ImportError(f"`{fullname}` has no successor in raysgd: {gone.reason}", name=fullname)
        if self._paths.is_package(fullname) and not _is_rays(fullname):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._modules.get(spec.name)
        return ModuleType(spec.name) if new is None else Alias(spec.name, importlib.import_module(new))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because `create_module` has already imported the module of raysgd."""


def _is_rays(name: str) -> bool:
    """Return True if the installed Ray has a package or module with this dotted name."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        return True
    package = sys.modules.get(parent) or importlib.import_module(parent)
    places = [Path(folder) / name.rpartition(".")[2] for folder in getattr(package, "__path__", ())]
    return any((place / "__init__.py").exists() or place.with_suffix(".py").exists() for place in places)


def install() -> None:
    """Redirect imports of `ray.util.sgd`, and of other modules that Ray no longer has, to raysgd.

    Call this function before the program starts Ray. The worker processes then redirect these imports too. If the
    program connects to a Ray cluster that is already running, also pass `runtime_env={"worker_process_setup_hook":
    "raysgd.compat.install"}` to `ray.init`.
    """
    os.environ[VARIABLE] = "1"
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
