"""Stories: modules that do something in a process of its own, such as losing nodes, and print what they saw as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.forked import to_lend

ROOT = Path(__file__).resolve().parents[2]


def run_story(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a module to its end, which has to be a good one; else its arguments and its last words are told."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **to_lend()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{module} {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
    return done


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What it printed last, but for words of Ray."""
    last = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    found: dict[str, Any] = json.loads(last)
    return found
