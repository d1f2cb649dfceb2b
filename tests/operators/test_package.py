from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd.operators


def test_the_sources_have_the_package_where_nothing_is_installed(tmp_path: Path) -> None:
    """As in workers of a program whose current folder is a checkout: its `raysgd` hides the installed one."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-S", "-c", "import raysgd.operators"], cwd=tmp_path, env=environment, check=True)


def test_importing_the_package_loads_no_framework() -> None:
    program = "import sys, raysgd.operators; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'numpy')))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_can_be_used_and_is_listed() -> None:
    assert {getattr(raysgd.operators, name).__name__ for name in raysgd.operators.__all__} == set(
        raysgd.operators.__all__
    )
    assert set(raysgd.operators.__all__) <= set(dir(raysgd.operators))


@pytest.mark.parametrize(
    "name", ["classification", "gan", "hugging_face", "loaders", "options", "regression", "segmentation"]
)
def test_the_examples_in_the_docstrings_do_what_they_show(name: str) -> None:
    module = importlib.import_module(f"raysgd.operators.{name}")
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoOperator"):
        _ = raysgd.operators.NoOperator
