"""Imports that a program and its own modules make, told apart from those of everybody else.

Today's Ray has a `ray.train`, and needs it. So only who is asked by the user's code answers differently: for that,
`builtins.__import__` looks at who imports. Nothing else tells an import statement of one module from another's.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from raysgd.compat.aliases import Alias
from raysgd.compat.paths import Paths

_original = builtins.__import__
_LIBRARIES = ("site-packages", "dist-packages")


def redirect(folder: Path, ray_train: bool) -> None:
    """From now on, imports of today's names of Ray lead to raysgd for modules of this folder and for the script.

    Args:
        folder: Where the program's own modules are.
        ray_train: Whether `ray.train` and `ray.air` are among the names; `ray.util.iter` always is.
    """
    builtins.__import__ = _ImportRedirect(folder, Paths(ray_train))


def undo() -> None:
    """Imports are Python's own again."""
    builtins.__import__ = _original


class _ImportRedirect:
    """The function that import statements call."""

    def __init__(self, folder: Path, paths: Paths) -> None:
        self._folder = folder
        self._paths = paths
        self._modules = dict(paths.modules())
        self._own: dict[str, bool] = {}

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level or not (name == "ray" or name.startswith("ray.")) or not self._is_own(globals or {}):
            return _original(name, globals, locals, fromlist or (), level)
        if fromlist:
            return self.seen(name, fromlist)
        self.seen(name)
        return self.seen("ray", [name.split(".")[1]] if "." in name else ())

    def seen(self, name: str, attributes: Sequence[str] = ()) -> ModuleType:
        """The module of this name as the program sees it."""
        if name in self._modules:
            alias = Alias(name, importlib.import_module(self._modules[name]))
            try:
                for attribute in attributes:
                    getattr(alias, attribute if attribute != "*" else "__name__")
            except AttributeError as error:  # the statement itself would drop the text
                raise ImportError(str(error), name=name) from None
            return alias
        module = importlib.import_module(name)
        for attribute in attributes:
            if not self.leads_away(f"{name}.{attribute}") and not hasattr(module, attribute):
                _import_if_there(f"{name}.{attribute}")
        return self._view(name, module)

    def _view(self, name: str, module: ModuleType) -> ModuleType:
        """Ray's module, with those of its submodules replaced that mean others."""
        return _RayView(name, module, self) if self.redirects_below(name) else module

    def leads_away(self, name: str) -> bool:
        """Return whether the program sees something else under this name than Ray's, or below it."""
        return name in self._modules or self.redirects_below(name)

    def place_of(self, name: str) -> str:
        """Return where a single name leads; nothing for one that is Ray's."""
        place = self._paths.find(name)
        return place.new or "" if place is not None else ""

    def redirects_below(self, name: str) -> bool:
        """Return whether an import of something below this name is redirected."""
        return self._paths.is_package(name)

    def _is_own(self, importer: Mapping[str, Any]) -> bool:
        module = str(importer.get("__name__", ""))
        if module in ("__main__", "__mp_main__"):
            return True
        if module not in self._own and "__file__" in importer:
            self._own[module] = self._is_in_folder(importer["__file__"])
        return self._own.get(module, False)

    def _is_in_folder(self, file: str | None) -> bool:
        if not file or any(part in _LIBRARIES for part in Path(file).parts):
            return False
        return Path(file).resolve().is_relative_to(self._folder) and not Path(file).resolve().is_relative_to(_HERE)


_HERE = Path(__file__).resolve().parents[1]


class _RayView(Alias):
    """A module of Ray in which some submodules are raysgd's; they are found when the program reads them."""

    def __init__(self, name: str, target: ModuleType, redirected: _ImportRedirect) -> None:
        super().__init__(name, target)
        vars(self)["_raysgd_redirected"] = redirected

    def __getattr__(self, name: str) -> Any:
        full, redirected = f"{vars(self)['__name__']}.{name}", vars(self)["_raysgd_redirected"]
        if redirected.leads_away(full):
            return redirected.seen(full)
        module, _, moved = redirected.place_of(full).rpartition(".")
        return getattr(importlib.import_module(module) if module else vars(self)["_raysgd_target"], moved or name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _view_there, (vars(self)["__name__"],)


def _view_there(name: str) -> ModuleType:
    """The same view in another process; Ray's own module where nothing is redirected."""
    redirected = builtins.__import__
    return redirected.seen(name) if isinstance(redirected, _ImportRedirect) else importlib.import_module(name)


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
