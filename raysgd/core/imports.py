"""Helpers for late imports, optional imports, and imports by name.

A module that needs an optional package calls `require` in the function that uses the package. If the package is
missing, `require` raises an error that says how to install it. If the package is broken, the error says so instead.

ADR 8 explains why Ray and the frameworks are imported late.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def require(module: str, extra: str, purpose: str | None = None) -> ModuleType:
    """Import an optional dependency, or raise an error that says how to install it.

    >>> require("json", extra="data").loads("[1, 2]")
    [1, 2]

    Args:
        module: Absolute dotted name of the module to import, for example `"mlflow.tracking"`.
        extra: The extra of this distribution that installs the package.
        purpose: What needs the module, as the subject of a sentence, for example `` "`MLflowLogger`" ``. Default:
            `"this feature"`.

    Returns:
        The imported module. For a dotted name, the innermost module.

    Raises:
        ModuleNotFoundError: The package is missing. A subclass of `ImportError`.
        ImportError: The package exists but its import fails. The original error is chained.
    """
    who = purpose or "this feature"
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = _missing(module, extra, error)
        if missing:
            raise ModuleNotFoundError(_missing_message(missing, extra, who), name=module) from error
        raise ImportError(_broken_message(module, extra, who, error), name=module) from error


def require_installed(module: str, extra: str, purpose: str) -> None:
    """If an optional dependency is missing, raise an error that says how to install it.

    The dependency is not imported, because that may take seconds.

    >>> require_installed("json", extra="data", purpose="this example")

    Raises:
        ModuleNotFoundError: The package is missing.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(_missing_message(_package_of(module), extra, purpose), name=module)


def _missing(module: str, extra: str, error: BaseException | None) -> str | None:
    """If an import failed because a package is missing, return the name of that package. Otherwise, return None.

    The missing package is either the package that contains `module`, or a package of the extra that `module` imports.

    Args:
        module: The module that was imported.
        extra: The extra of this distribution that installs the package.
        error: The error of the import.
    """
    while error is not None:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        if name and (name == _package_of(module) or _named(name, extra)):
            return name
        error = error.__cause__
    return None


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def install_command(extra: str, *options: str, package: str = "") -> str:
    """Return the pip command that installs the packages of one of raysgd's extras.

    With `package`, the command installs only that package.

    The command names the packages, so it works no matter how raysgd was installed. If raysgd is not installed, the
    command names the source folder.
    """
    folder = f"{Path(__file__).resolve().parents[2]}[{extra}]"
    wanted = _named(package, extra) or _requirements("raysgd", extra) or [folder]
    return " ".join(["pip install", *options, *(f'"{each}"' for each in dict.fromkeys(wanted))])


def _named(package: str, extra: str) -> list[str]:
    """Return the requirement that one of raysgd's extras declares for a package, as a list with one entry.

    The extra may declare the requirement directly or through another package's extra. If it declares none, the list is
    empty.
    """
    own = _requirements("raysgd", extra)
    extras = [re.match(r"([\w-]+)\[(\w+)\]", each) for each in own]
    all_of_it = [*own, *(each for other in extras if other for each in _requirements(other[1], other[2]))]
    pattern = re.compile(rf"{re.escape(package).replace('_', '[-_]')}(-skinny)?(?![\w-])", re.IGNORECASE)
    return [each for each in all_of_it if pattern.match(each)][:1] if package else []


def _requirements(distribution: str, extra: str) -> list[str]:
    """Return the packages that an installed package's extra requires.

    Return an empty list if that package is not installed.
    """
    from importlib import metadata

    try:
        lines = [line.partition(";") for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
    mark = re.compile(rf"""extra == ["']{extra}["']""")
    named = [name.strip() for name, _, marker in lines if mark.search(marker)]
    return [each for name in named for each in _without_own_extras(name)]


def _without_own_extras(requirement: str) -> list[str]:
    own = re.fullmatch(r"raysgd\[(\w+)\]", requirement)
    return _requirements("raysgd", own[1]) if own else [requirement]


def _missing_message(package: str, extra: str, who: str) -> str:
    return f"{who} needs `{package}`, which is not installed. Run: {install_command(extra, package=package)}"


def _broken_message(module: str, extra: str, who: str, error: Exception) -> str:
    return (
        f"{who} needs `{module}`. The package `{_package_of(module)}` is installed, but importing it failed "
        f"with {type(error).__name__}: {error}. Repair that installation, or run: "
        f"{install_command(extra, '--upgrade', '--force-reinstall')}"
    )


def lazy_names(package: str, modules: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Make a package import its names and public modules on first use, by adding a `__getattr__` to the package.

    This also adds a `__dir__` that lists the public names. Type checkers ignore both functions, so they still report
    misspelled names.

    Args:
        package: The package's `__name__`.
        modules: For each name, the module that defines it, or `module:name` if the name differs in that module. By
            default, the package's file `__init__.pyi` lists the names, as type checkers read them, and they become the
            package's `__all__`.

    Returns:
        The `__getattr__` function.
    """
    namespace, shown = vars(sys.modules[package]), set[str]()
    if modules is None:
        text = Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
        listed = re.findall(r"^from (\S+) import (\w+) as (\w+)$", text, flags=re.MULTILINE)
        modules = {name: f"{module}:{name_there}" for module, name_there, name in listed if module != "."}
        shown = {name for module, _, name in listed if module == "."}
        namespace["__all__"] = sorted([*modules, *re.findall(r"^def (\w+)", text, flags=re.MULTILINE)])

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
        return sorted({*namespace.get("__all__", namespace), *modules, *(shown or submodules())})

    namespace.update(__getattr__=find, __dir__=names)
    return find


def pickle_modules_by_name() -> None:
    """Let pickle store modules by name even if a module's class is a subclass of `ModuleType`.

    Cloudpickle pickles a script's functions and classes together with the modules that they may use. For example, if a
    class uses `torch.distributed` and `self.config`, cloudpickle assumes that it uses the module
    `torch.distributed.config`. The class of that module is a subclass of `ModuleType`, and pickle rejects instances of
    such subclasses.
    """
    own = {type(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)} - {ModuleType}
    for kind in own - copyreg.dispatch_table.keys():
        if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    if sys.modules.get(module.__name__) is not module:
        raise TypeError(f"cannot pickle '{type(module).__name__}' object, which no import finds")
    return importlib.import_module, (module.__name__,)
