"""What runs on the servers of the repository, as far as it can be checked without them."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_unless_a_job_says_more(path: Path) -> None:
    workflow = read(path)
    assert (
        {"name", True, "permissions", "jobs"} <= workflow.keys() <= {"name", True, "permissions", "jobs", "concurrency"}
    )
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.keys() >= {"uses"} or job.keys() >= {"runs-on", "steps"}
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_their_commit(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if "uses:" in line and "uses: ./" not in line:
            assert re.search(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    workflow = read(path)
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    for step in steps_of(workflow):
        words = step.get("run", "").split()
        targets = words[1:2] if words[:1] == ["make"] else []
        if "${{ matrix.target }}" in step.get("run", ""):
            targets = [target for matrix in matrices for target in matrix.get("target", ())]
        assert set(targets) <= TARGETS
        assert all((ROOT / word).is_file() for word in words if word.startswith(".ci/"))


def test_the_newest_versions_and_the_long_tests_run_every_week() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "weekly.yml")
    [schedule] = workflow[True]["schedule"]  # in YAML 1.1, `on` is a boolean
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    [job] = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["target"] == ["test-newest", "soak", "leaves"]
    assert job["timeout-minutes"] <= 360


def test_a_release_is_built_with_packages_of_known_hashes() -> None:
    steps = steps_of(read(ROOT / ".github" / "workflows" / "release.yml"))
    commands = [step["run"] for step in steps if "run" in step]
    installs = [command for command in commands if "pip install" in command]
    assert installs == ["python -m pip install --require-hashes --only-binary :all: -r .ci/release.txt"]
    builds = [command for command in commands if "-m build" in command]
    assert builds == ["python -m build --no-isolation && python -m twine check --strict dist/*"]
    assert commands[-1] == "python .ci/wheel_files.py dist/*.whl", "after the build"
    text = re.sub(r"\\\n", "", (ROOT / ".ci" / "release.txt").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(?:\s+--hash=sha256:[0-9a-f]{64})+\s*", line) for line in lines)
    assert {"build", "setuptools", "twine"} <= {line.partition("==")[0] for line in lines}


def test_a_wheel_with_another_file_than_the_commit_is_noticed(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("wheel_files", ROOT / ".ci" / "wheel_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = {"raysgd/__init__.py": b"1", "raysgd/a.py": b"2"}
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name, content in (*files.items(), ("raysgd-1.dist-info/METADATA", b"")):
            wheel.writestr(name, content)
    assert module.differences(zipfile.ZipFile(tmp_path / "a.whl"), files) == []
    other = {"raysgd/__init__.py": b"3", "raysgd/b.py": b""}
    assert module.differences(zipfile.ZipFile(tmp_path / "a.whl"), other) == [
        "raysgd/__init__.py: differs",
        "raysgd/a.py: not in the commit",
        "raysgd/b.py: missing",
    ]
