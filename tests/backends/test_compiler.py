"""The import of PyTorch's compiler is put off until something needs it; only the time tells."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.stories import found_by, run_story

SCRIPT = Path(__file__).with_name("compiler_scenarios.py")
SCENARIOS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What became of each scenario; in another process, because this one may have imported the compiler long ago."""
    return found_by(run_story("tests.backends.compiler_scenarios", timeout_s=120))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_in_which_the_compiler_was_put_off(name: str, found: dict[str, str]) -> None:
    assert found[name] == ""
