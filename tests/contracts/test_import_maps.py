"""Every module and name of both contracts' import maps is there, or the table of old paths says why it is gone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from raysgd.compat.paths import Paths

LINES = Path(__file__).with_name("import_map.txt").read_text(encoding="utf-8").splitlines()
ROWS = [
    tuple(part.strip() for part in line.replace(" = ", ":").split(":")) for line in LINES if line and line[0] != "#"
]


def reason_of(old: str) -> str:
    """Return why a name of the old library is gone; nothing if it is not."""
    found = Paths(ray_train=True).find(old)
    return "" if found is None or found.new is not None or not found.is_listed else found.reason


def is_in(module: ModuleType, name: str) -> bool:
    """Tell whether a module has a name, also one that needs a package which is not installed."""
    try:
        return hasattr(module, name)
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("raysgd")


def test_the_maps_have_all_modules() -> None:
    assert len(ROWS) == len({new for new, _, _ in ROWS}) == 72


@pytest.mark.parametrize(("new", "old", "names"), ROWS, ids=[new for new, _, _ in ROWS])
def test_a_module_has_its_names_or_the_table_says_why_not(new: str, old: str, names: str) -> None:
    try:
        module = importlib.import_module(new)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("raysgd"):
            pytest.skip(f"needs `{error.name}`")
        assert reason_of(old)
        return
    for name in names.split():
        assert is_in(module, name) or reason_of(f"{old}.{name}"), name
