"""The import of PyTorch's compiler is put off until something needs it; only the time tells."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiler_scenarios.py")
SCENARIOS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What became of each scenario; in another process, because this one may have imported the compiler long ago."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_in_which_the_compiler_was_put_off(name: str, found: dict[str, str]) -> None:
    assert found[name] == ""
