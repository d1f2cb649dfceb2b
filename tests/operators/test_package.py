from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest

import raysgd.operators


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
