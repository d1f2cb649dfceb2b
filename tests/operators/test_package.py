from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd.operators


def alone(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the sources, and none of the installed packages."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=folder, env=environment, text=True, capture_output=True
    )


def test_the_sources_have_the_package_where_nothing_is_installed(tmp_path: Path) -> None:
    """As in workers of a program whose current folder is a checkout: its `raysgd` hides the installed one."""
    found = alone(tmp_path, "import importlib.util as u; print(u.find_spec('raysgd.operators').origin)")
    assert Path(found.stdout.strip()).samefile(raysgd.operators.__file__ or ""), found.stderr


def test_without_pytorch_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    error = alone(tmp_path, "import raysgd.operators").stderr
    assert "ModuleNotFoundError: `raysgd.operators` needs `torch`, which is not installed. Run: pip install" in error


def test_every_public_name_can_be_used_and_is_listed() -> None:
    assert {getattr(raysgd.operators, name).__name__ for name in raysgd.operators.__all__} == set(
        raysgd.operators.__all__
    )
    assert set(raysgd.operators.__all__) <= set(dir(raysgd.operators))


@pytest.mark.parametrize("name", ["gan", "hugging_face", "loaders", "options", "supervised"])
def test_the_examples_in_the_docstrings_do_what_they_show(name: str) -> None:
    module = importlib.import_module(f"raysgd.operators.{name}")
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoOperator"):
        _ = raysgd.operators.NoOperator
