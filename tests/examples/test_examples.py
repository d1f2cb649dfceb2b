"""Every script in `examples` runs as a user would run it: as a program of its own, from somewhere else.

The quick start brings a Ray cluster of its own, as it does for whoever tries it first. The others share one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
QUICKSTART = "quickstart.py"  # a test of its own runs it to its end, which takes little longer than its smoke test
TIMEOUT_S = 160
PATIENCE_S = 15

# Not the scripts' own: Ray's logs of its sessions, PyTorch's cache, what TensorFlow leaves of a process that is killed,
# and the lock of data creators, which stays so that nobody locks a file that somebody else removes.
MAY_STAY = re.compile(r"ray|torchinductor_.*|__autograph_generated_file.*|__pycache__|\.raydata-\d+\.lock")


@dataclass(frozen=True)
class Surroundings:
    """Folders for one program only."""

    working: Path
    temporary: Path


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    # Not below `tmp_path`: Ray puts sockets there, whose paths have a limit.
    with tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True) as temporary:
        yield Surroundings(tmp_path, Path(temporary))


@pytest.fixture
def address(ray_cluster: None) -> str:
    """Where the cluster of the tests is."""
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def run(script: str, surroundings: Surroundings, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """Run it and return what it printed, and its result: the last line."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=surroundings.working,
        env={**environment, "TMPDIR": str(surroundings.temporary)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *lines, last = finished.stdout.splitlines()
    return lines, json.loads(last)


def processes_of(surroundings: Surroundings) -> list[str]:
    """Return what still runs and names the temporary folder, after a while in which it may end."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := _processes_naming(str(surroundings.temporary))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _processes_naming(folder: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if folder in command:
            found.append(command)
    return found


def assert_tidy(lines: list[str], surroundings: Surroundings) -> None:
    assert lines, "nothing for people to read"
    assert not [line for line in lines if "raylet" in line or "INFO" in line or "WARNING" in line]
    assert processes_of(surroundings) == []
    assert not [path for path in surroundings.temporary.iterdir() if not MAY_STAY.fullmatch(path.name)]
    assert list(surroundings.working.iterdir()) == []


def test_there_are_scripts() -> None:
    assert {"quickstart.py", "train_example.py", "dcgan.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_has_the_usual_options(script: str) -> None:
    source = (EXAMPLES / script).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    assert [
        option for option in ("num-workers", "use-gpu", "smoke-test", "address") if f'"--{option}"' not in source
    ] == []


@pytest.mark.integration
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.soak] * (name == QUICKSTART)) for name in SCRIPTS]
)
def test_a_smoke_test_ends_well_and_leaves_nothing_behind(
    script: str, surroundings: Surroundings, address: str
) -> None:
    lines, result = run(script, surroundings, "--smoke-test", "--address", address)
    assert result["num_workers"] == 2
    assert result["epochs"] == 1
    assert_tidy(lines, surroundings)


@pytest.mark.integration
def test_the_quickstart_learns_to_read_digits(surroundings: Surroundings) -> None:
    lines, result = run(QUICKSTART, surroundings)
    assert result["test_accuracy"] > 0.95
    assert result["seconds"] > 0
    assert len([line for line in lines if line.startswith("epoch ")]) == result["epochs"]
    assert result["num_workers"] == 2
    assert_tidy(lines, surroundings)
