"""The examples in the docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import raysgd

ROOT = Path(raysgd.__file__).parent


def modules_with_examples() -> list[str]:
    example_that_runs = re.compile(r">>> (?!.*(?:\n *\.\.\. .*)*SKIP)")
    paths = sorted(path for path in ROOT.rglob("*.py") if example_that_runs.search(path.read_text("utf-8")))
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_do_what_they_show(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
