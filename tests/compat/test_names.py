"""Names that programs for the old library look for."""

from __future__ import annotations

import importlib

import pytest

from raysgd.compat.names import MOVED


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MOVED.items() for name in names])
def test_a_name_that_moved_is_found_where_it_was(module: str, name: str) -> None:
    place, _, name_there = MOVED[module][name].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert found is vars(importlib.import_module(place))[name_there or name]
    assert name in dir(importlib.import_module(module))
