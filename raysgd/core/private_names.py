"""A table of the private names of other projects that raysgd uses, and functions to look up such names.

A new version of a project may remove any of these names. Each name therefore has a public alternative, a simpler
fallback, or an error that names the version to install. The table is `private_names.ini`. `find_name` returns None if a
name no longer exists; `require_names` raises an error. Documented names are not listed, even if they look private, such
as `sys._current_frames`, `os._exit`, and `_fields` of a named tuple. `raysgd doctor` lists the names that installed
packages lack, if the packages are newer than the tested versions. `tests/core/test_private_names.py` checks that the
table is complete, and tests what happens without each name.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

from raysgd.core.tables import read_table

_VERSIONS = "versions"


@dataclass(frozen=True)
class PrivateNames:
    """A row of the table: private names of one object in another project, and where raysgd uses them.

    Attributes:
        owner: The module or `module:object` that has the names.
        names: The private names.
        used_in: Modules of `raysgd` that use the names.
        without: What raysgd does if the installed version no longer has one of the names.
    """

    owner: str
    names: tuple[str, ...]
    used_in: str
    without: str

    @property
    def package(self) -> str:
        """The package that the names belong to."""
        return re.split("[.:]", self.owner)[0]


@cache
def private_names() -> tuple[PrivateNames, ...]:
    """Return all rows of the table."""
    rows = [(title.split(), row) for title, row in read_table(__file__).items() if title != _VERSIONS]
    return tuple(PrivateNames(owner, tuple(names), row["used in"], row["without"]) for (owner, *names), row in rows)


def versions_tested() -> dict[str, str]:
    """Return the versions of other projects with which raysgd is tested."""
    return read_table(__file__)[_VERSIONS]


def find_name(path: str) -> Any:
    """Import a module and return an object in it, or None if the module or the object does not exist.

    >>> find_name("os:path.sep"), find_name("os:path._gone.deeper"), find_name("gone:name")
    ('/', None, None)

    Args:
        path: The object as `module:name`, where the name may have several parts.
    """
    module, _, names = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        return None
    for name in names.split("."):
        value = getattr(value, name, None)
    return value


def require_names(owner: Any, *names: str) -> None:
    """Raise an error if an object of another project lacks a name. Use this if results would be wrong without the name.

    Args:
        owner: An object, class or module.
        names: Names that `owner` must have.

    Raises:
        ImportError: A name is missing. The message says which version has it.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        modules = [owner.__name__] if isinstance(owner, ModuleType) else [each.__module__ for each in classes]
        tested = versions_tested()
        package = next(each for each in (module.partition(".")[0] for module in modules) if each in tested)
        raise ImportError(
            f"`{package}` {getattr(sys.modules[package], '__version__', '')} no longer has "
            f"{', '.join(f'`{name}`' for name in missing)}, which raysgd needs to train correctly. "
            f'Run: pip install "{package}<={tested[package]}"'
        )


def missing_names(row: PrivateNames) -> list[str]:
    """Return the names in a row of the table that the installed package lacks.

    Return an empty list if the package is not installed. A name counts as present if the owner is loaded and has it, or
    if the name occurs in the source code of the owner's module. This function imports nothing, so import packages with
    compiled modules first: compiled modules have no source code to search.
    """
    package, *parts = row.owner.partition(":")[0].split(".")
    spec = util.find_spec(package)
    text = "" if spec is None else _source(spec.submodule_search_locations or (), parts)
    owner: Any = sys.modules.get(".".join([package, *parts]))
    for each in filter(None, row.owner.partition(":")[2].split(".")):
        owner = getattr(owner, each, None)
    has = [hasattr(owner, name) or re.search(rf"\b{name}\b", text) for name in row.names]
    return [] if spec is None else [name for name, is_there in zip(row.names, has, strict=True) if not is_there]


def _source(folders: Iterable[str], parts: Sequence[str]) -> str:
    places = [Path(folder, *parts) for folder in folders]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return "".join(file.read_text(encoding="utf-8") for file in files)
