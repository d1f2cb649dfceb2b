"""What stands for a package does not import it before a test does."""

from __future__ import annotations

import inspect

import pytest

from tests.helpers.lazily import imported


def test_looking_for_fixtures_and_tests_imports_nothing() -> None:
    nothing = imported("no_such_module")
    assert inspect.unwrap(nothing) is nothing  # type: ignore[arg-type]
    assert getattr(nothing, "_mock_name", None) is None
    assert getattr(nothing, "__test__", False) is False
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = nothing.name


def test_names_are_those_of_the_module_or_of_something_in_it() -> None:
    assert imported("os").path.sep == "/"
    assert imported("os", "path").sep == "/"
