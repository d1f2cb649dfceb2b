"""The import of PyTorch's compiler is deferred until something needs it; nothing but the time shows that."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd.connections import _compiler
from tests.helpers.stories import ROOT

SCRIPT = Path(__file__).with_name("compiler_scenarios.py")
SCENARIOS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


CONSTRAINTS = Path(__file__).parents[2] / "constraints-dev.txt"


@pytest.fixture(scope="module")
def scenarios() -> Iterator[subprocess.Popen[str]]:
    """What runs them: another process, because this one may have imported the compiler long ago."""
    command = [sys.executable, "-m", "tests.connections.compiler_scenarios"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.program
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_in_which_the_compiler_is_deferred(name: str, scenarios: subprocess.Popen[str]) -> None:
    assert scenarios.stdin is not None
    assert scenarios.stdout is not None
    scenarios.stdin.write(f"{name}\n")
    scenarios.stdin.flush()
    traceback = json.loads(scenarios.stdout.readline())
    assert not traceback, traceback


def test_where_it_is_turned_off_everything_stays_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_compiler.SWITCH, "1")
    before, finders = sys.modules.get("torch._dynamo"), list(sys.meta_path)
    with caplog.at_level(logging.DEBUG, "raysgd"):
        _compiler.defer_compiler()
    assert (sys.modules.get("torch._dynamo"), sys.meta_path) == (before, finders)
    assert _compiler.SWITCH in caplog.text
