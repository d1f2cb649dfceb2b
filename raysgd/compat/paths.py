"""Reads the table of the old library's names: for each, its current name in raysgd, or why it has none.

The old library is `ray.util.sgd`, together with the former `ray.train` and `ray.air`. The table is `paths.ini`. `raysgd
migrate` uses it to rewrite programs, and `raysgd.compat.install` to redirect their imports. The tables in
`docs/migration.md` are made from it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Literal

from raysgd.core.tables import read_table

Group = Literal["sgd", "train"]
"""A group of old names: "train" for names of the former `ray.train` and `ray.air`, "sgd" for all others.

`raysgd migrate` changes names of the group "train" only if the user passes `--ray-train`, because many of them have
another meaning in current Ray.
"""

_EXPERIMENTAL = "ray.experimental.sgd"
_FORMERLY = ("", ".pytorch", ".tf", ".utils")
"""Submodules of `ray.util.sgd` that were in `ray.experimental.sgd` before."""
_GROUPS: dict[Group, tuple[str, ...]] = {"sgd": ("sgd", "beside sgd", "inside Ray"), "train": ("train",)}
"""The sections of the table that belong to a group."""
_OF_RAY = "(trainer of Ray)"
_NUM_NAMES = 5
RAY_TRAIN = "2.60"
"""The version of Ray for which the tables are complete: they contain every public name of its `ray.train`."""


@dataclass(frozen=True)
class NewPlace:
    """The current name for an old name, or the reason why there is none.

    Attributes:
        old: The old name, including its module.
        new: The current name, including its module. None if there is none.
        reason: If there is no current name, why, and what to use instead.
        module: The module to import for the current name.
        is_listed: False if the old name is in an old module but not in the tables, such as an internal name of the old
            library. Programs should not use such names.
    """

    old: str
    new: str | None
    reason: str = ""
    module: str = ""
    is_listed: bool = True

    @property
    def is_trainer_of_ray(self) -> bool:
        """True if the old name is a trainer that only Ray has, or a part of one. Such a trainer needs Ray's configs."""
        return self.reason == read_table(__file__)["reasons"][_OF_RAY]


class Paths:
    """The table of old and new names, with the entries that apply to one program.

    Args:
        ray_train: True if `ray.train` and `ray.air` in the program mean the old library, not current Ray.
        beside_sgd: True if the program uses `ray.util.sgd` or another module that Ray no longer has.
        keeps_ray_train: True if all of `ray.train` and `ray.air` in the program must stay Ray's, because the program
            uses a trainer that only Ray has.
    """

    def __init__(self, ray_train: bool = False, beside_sgd: bool = True, keeps_ray_train: bool = False) -> None:
        self._keeps_ray_train = keeps_ray_train
        more = {"beside sgd": beside_sgd, "train": ray_train, "kept by Ray": keeps_ray_train}
        sections = ["sgd", "inside Ray", *(section for section, is_wanted in more.items() if is_wanted)]
        self._modules = {old: row for section in sections for old, row in _modules(section).items()}
        self._renamed = renamed() if ray_train else read_table(__file__)["renamed"]
        self._packages = {package for module, _ in self.modules() for package, rest in _cuts(module) if rest}

    def find(self, old: str) -> NewPlace | None:
        """Return the table's entry for a dotted name, or None if the dotted name does not belong to the old library.

        For an attribute of a class, such as `TorchTrainer.train`, the entry has the class's current name with the
        attribute.
        """
        if old in self._modules:
            return NewPlace(old, self._modules[old][0], module=self._modules[old][0])
        for known, rest in _cuts(old):
            if (place := self._single(known)) is not None:
                return NewPlace(old, place.new and f"{place.new}{rest}", place.reason, place.module)
            if known in self._modules:
                return self._inside(old, known)
        if f"{old}.".startswith(f"{_EXPERIMENTAL}."):
            place = self.find(old.replace(_EXPERIMENTAL, "ray.util.sgd", 1))
            return place and replace(place, old=old)
        return None

    def today(self, name: str) -> str:
        """Return the current name for a dotted name, or the dotted name itself if the table has no current name."""
        place = self.find(name)
        return (place and place.new) or name

    def is_of_ray(self, module: str) -> bool:
        """Return True if a module name can only mean a module of current Ray, not one of the old library."""
        means_two = _means_two(module) and not self._keeps_ray_train
        return self.find(module) is None and not self.is_package(module) and not means_two

    def is_package(self, old: str) -> bool:
        """Return True if the table has modules inside the package with this name."""
        return old in self._packages

    def modules(self) -> Iterator[tuple[str, str]]:
        """Yield the names of all old modules, each with the name of the current module."""
        for old, (new, _) in self._modules.items():
            yield old, new
            part = old.removeprefix("ray.util.sgd")
            if part != old and any(part == each or (each and part.startswith(f"{each}.")) for each in _FORMERLY):
                yield f"{_EXPERIMENTAL}{part}", new

    def _single(self, name: str) -> NewPlace | None:
        module, _, last = name.rpartition(".")
        new_module, names = self._modules.get(module, ("", ""))
        if last in names.split():
            return NewPlace(name, f"{new_module}.{last}", module=new_module)
        if name in self._renamed:
            return NewPlace(name, self._renamed[name], module=self._renamed[name].rpartition(".")[0])
        reason = gone().get(name)
        return NewPlace(name, None, reason) if reason is not None and self._knows(name) else None

    def _knows(self, name: str) -> bool:
        if _means_two(name):
            return "ray.train" in self._modules
        return not name.startswith("ray.util.iter") or "ray.util.iter" in self._modules

    def _inside(self, old: str, module: str) -> NewPlace | None:
        """Return an entry for a name that the table does not list under its old module.

        The table may list `module.Name`, while the program uses `module.submodule.Name`. In that case, the entry has
        the current name for `module.Name`. Otherwise, the entry says that raysgd lacks the name. Return None for a name
        that belongs to current Ray.

        Args:
            old: The old name.
            module: The old module, which is a prefix of `old`.
        """
        new, names = self._modules[module]
        inside = old.removeprefix(f"{module}.")
        for known, rest in _cuts(inside):
            name = known.rpartition(".")[2]
            if self._single(f"{module}.{name}") is not None:
                place = self.find(f"{module}.{name}{rest}")
                return place and replace(place, old=old)
        if module in _modules("train") and module.startswith("ray.tune."):
            return None  # the names in these modules that the table does not list belong to current Ray
        return NewPlace(old, None, _has(new, module, names.split(), inside), is_listed=False)


def _has(new: str, module: str, names: Sequence[str], missing: str) -> str:
    """Return a phrase for an error message about a name that raysgd lacks. The phrase lists names that raysgd has.

    Args:
        new: The current module.
        module: The old module.
        names: Names of the old module that raysgd has.
        missing: The missing name. Similar names are listed, or the first few if no name is similar.
    """
    some = get_close_matches(missing.rpartition(".")[2], names, cutoff=0.5) or names[:_NUM_NAMES]
    if not some:
        return f"`{new}` has none of its names, and raysgd has no internals of the old library"
    listed = ", ".join(f"`{name}`" for name in some)
    others = "" if len(some) == len(names) else f" and {len(names) - len(some)} more"
    return f"of `{module}` raysgd has {listed}{others}, and no internals"


def _means_two(name: str) -> bool:
    """Return True if a name may mean something in the old library and something else in current Ray."""
    return name.startswith(("ray.train", "ray.air", "ray.ml"))


def table(group: Group) -> list[tuple[str, str, str]]:
    """Return three strings for each old module of a group: the old module, the current one, and the names in both.

    The names are separated by spaces.
    """
    return [(old, new, names) for section in _GROUPS[group] for old, (new, names) in _modules(section).items()]


@cache
def _modules(section: str) -> dict[str, tuple[str, str]]:
    """Return the old modules of a section of the table, each with the current module and the names in both."""
    rows = ((old, row.partition(":")) for old, row in read_table(__file__)[section].items())
    return {old: (new, names.strip()) for old, (new, _, names) in rows}


@cache
def gone() -> dict[str, str]:
    """Return the old names for which raysgd has no current name, each with the reason and what to use instead."""
    reasons = read_table(__file__)["reasons"]
    return {name: reasons.get(reason, reason) for name, reason in read_table(__file__)["gone"].items()}


def renamed() -> dict[str, str]:
    """Return the old names that have a current name but are not listed by `table`, each with the current name."""
    return {**read_table(__file__)["renamed"], **read_table(__file__)["renamed train"]}


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield each way to split a dotted name into a prefix and the remainder, starting with the longest prefix."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end]), "".join(f".{part}" for part in parts[end:])
