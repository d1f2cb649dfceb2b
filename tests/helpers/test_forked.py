"""Processes that are forked for Ray are what they would be if it had started them; all others are started as usual."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import SWITCH, Forks, NoForks, forks

PROGRAM = """
import json, os, random, sys
print(json.dumps({
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "loaded": [name for name in ("json.tool", "ray", "raysgd") if name in sys.modules],
    "path": sys.path[:2],
    "variable": os.environ.get("RAYSGD_TEST_VARIABLE"),
    "is leader": os.getpgid(0) == os.getpid(),
    "chance": random.random(),
}))
"""


def run(found: Forks, folder: Path, name: str) -> dict[str, Any]:
    """What a program of this name says of itself."""
    (folder / name).write_text(PROGRAM)
    environment = {**os.environ, "RAYSGD_TEST_VARIABLE": name, "PYTHONPATH": "/somewhere"}
    command = [str(found.interpreter), str(folder / name), "one", "two"]
    output = subprocess.run(command, cwd=folder, env=environment, stdout=(folder / "output").open("w"), check=True)
    assert output.returncode == 0
    return _waited_for(folder / "output")


def _waited_for(path: Path) -> dict[str, Any]:
    """What a forked process writes, for which nobody waits."""
    for _ in range(2400):
        if (text := path.read_text()).endswith("\n"):
            found: dict[str, Any] = json.loads(text)
            return found
        time.sleep(0.05)
    raise TimeoutError(path)


def test_workers_are_forked_and_other_programs_are_not(tmp_path: Path) -> None:
    with forks(["json.tool"]) as found:
        assert isinstance(found, Forks)
        workers = [run(found, tmp_path, "default_worker.py") for _ in range(2)]
        other = run(found, tmp_path, "other.py")
    for worker in workers:
        assert worker["loaded"] == ["json.tool"]
        assert worker["is leader"]
        assert (worker["arguments"], worker["folder"]) == (["one", "two"], str(tmp_path))
        assert worker["path"] == [str(tmp_path), "/somewhere"] == other["path"]
        assert worker["variable"] == "default_worker.py"
    assert workers[0]["chance"] != workers[1]["chance"]
    assert (other["loaded"], other["variable"]) == ([], "other.py")
    assert found.server.poll() is not None, "it ends with the block"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with forks() as found:
        assert isinstance(found, NoForks)
