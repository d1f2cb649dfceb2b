"""The import of PyTorch's compiler is deferred until something needs it; nothing but the time shows that."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raysgd.connections import _compiler
from tests.helpers.stories import ROOT

SCRIPT = Path(__file__).with_name("compiler_scenarios.py")
SCENARIOS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


CONSTRAINTS = Path(__file__).parents[2] / "constraints-dev.txt"
IS_TESTED = not _compiler._obstacle(torch.__version__, switch="")


@pytest.fixture(scope="module")
def scenarios() -> Iterator[subprocess.Popen[str]]:
    """What runs them: another process, because this one may have imported the compiler long ago."""
    command = [sys.executable, "-m", "tests.connections.compiler_scenarios"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.program
@pytest.mark.skipif(not IS_TESTED, reason=f"torch {torch.__version__} imports its compiler by itself")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_in_which_the_compiler_is_deferred(name: str, scenarios: subprocess.Popen[str]) -> None:
    assert scenarios.stdin is not None
    assert scenarios.stdout is not None
    scenarios.stdin.write(f"{name}\n")
    scenarios.stdin.flush()
    traceback = json.loads(scenarios.stdout.readline())
    assert not traceback, traceback


def test_the_versions_are_those_that_these_tests_run_with() -> None:
    [pin] = re.findall(r"^torch==(\d+\.\d+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pin in _compiler.TESTED_VERSIONS, "add the version when all scenarios pass with it, or leave it out"


@pytest.mark.parametrize(
    ("version", "switch", "is_deferred"),
    [
        ("2.13.0", "", True),
        ("2.13.1+cpu", "0", True),
        ("2.13.0", "1", False),
        ("2.1.3", "", False),
        ("2.14.0a0+git1", "", False),
        ("nightly", "", False),
    ],
)
def test_it_is_deferred_only_where_that_was_tested_and_is_wanted(version: str, switch: str, is_deferred: bool) -> None:
    assert (not _compiler._obstacle(version, switch)) == is_deferred


@pytest.mark.parametrize("cause", ["tested", "RAYSGD_EAGER_COMPILER"])
def test_otherwise_everything_stays_and_the_log_says_why(
    cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compiler, "TESTED_VERSIONS", ("1.13",) if cause == "tested" else _compiler.TESTED_VERSIONS)
    monkeypatch.setenv(_compiler.SWITCH, "" if cause == "tested" else "1")
    before, finders = sys.modules.get("torch._dynamo"), list(sys.meta_path)
    with caplog.at_level(logging.DEBUG, "raysgd"):
        _compiler.defer_compiler()
    assert (sys.modules.get("torch._dynamo"), sys.meta_path) == (before, finders)
    assert cause in caplog.text
