"""The examples in the docstrings do what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysgd

ROOT = Path(raysgd.__file__).parent


def docstrings_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def has_examples_that_run(path: Path) -> bool:
    if ">>>" not in path.read_text(encoding="utf-8"):  # said quickly of most
        return False
    examples = [found for text in docstrings_in(path) for found in doctest.DocTestParser().get_examples(text)]
    return any(doctest.SKIP not in example.options for example in examples)


def modules_with_examples() -> list[str]:
    paths = sorted(path for path in ROOT.rglob("*.py") if has_examples_that_run(path))
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_do_what_they_show(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
