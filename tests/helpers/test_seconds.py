"""The order in which several processes begin the files of tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.helpers.seconds import longest_first


def test_files_that_take_long_begin_first_and_so_do_unknown_ones() -> None:
    nodes = ["short.py::a", "long.py::a", "new.py::a", "long.py::b"]
    items: list[Any] = [SimpleNamespace(nodeid=node) for node in nodes]
    longest_first(items, {"short.py": 1.0, "long.py": 60.0})
    assert [item.nodeid for item in items] == ["new.py::a", "long.py::a", "long.py::b", "short.py::a"]
