"""The command `raysgd`, as a user types it.

Covers `raysgd.cli.self_test`, which runs in two real workers here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raysgd import __version__
from raysgd.cli import doctor
from raysgd.cli.main import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_the_group_says_what_there_is() -> None:
    found = run("--help")
    assert found.exit_code == 0
    commands = {"attach", "bisect", "doctor", "list", "migrate", "replay", "status", "stop", "why"}
    assert commands == set(main.commands)
    for name, command in main.commands.items():
        assert name in found.output
        assert command.help, f"`raysgd {name}` has no help"


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").output.strip() == f"raysgd, version {__version__}"


def test_it_is_installed_as_a_command_and_runs_as_a_module() -> None:
    [entry] = [each for each in metadata.entry_points(group="console_scripts") if each.name == "raysgd"]
    assert entry.load() is main
    finished = subprocess.run([sys.executable, "-m", "raysgd", "--version"], capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("raysgd, version")


def test_the_command_loads_neither_ray_nor_a_framework() -> None:
    source = (
        "import sys, raysgd.cli.main; print([name for name in ('ray', 'torch', 'tensorflow') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_without_a_folder_the_newest_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = run("status")
    assert (found.exit_code, "There is none in ~/ray_results." in found.output) == (2, True)
    for number in range(4):
        folder = tmp_path / f"ray_results/run_{number}"
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    named = [line for line in run("status").output.splitlines() if line.startswith("  raysgd status")]
    assert named == [f"  raysgd status {tmp_path}/ray_results/run_{number}" for number in (3, 2, 1)]


def test_the_status_of_a_run_is_printed(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"loss": 0.25, "done": True}) + "\n")
    found = run("status", str(tmp_path))
    assert found.exit_code == 0
    assert "finished" in found.output
    assert "loss=0.25" in found.output


@pytest.mark.parametrize("path", ["", "nowhere://bucket/run", "s3:///run"])
def test_a_path_that_can_be_none_is_an_error_without_a_traceback(path: str) -> None:
    found = run("status", path)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert isinstance(found.exception, SystemExit)


def test_control_codes_in_names_of_a_folder_are_escaped_in_errors(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2Jname"
    folder.mkdir()
    found = run("status", str(folder))
    assert found.exit_code == 1
    assert "a\\x1b[2Jname` is not the folder of a run" in found.output


@pytest.mark.integration
def test_the_doctor_trains_on_two_workers_of_the_cluster(ray_cluster: None) -> None:
    found = run("doctor")
    assert found.exit_code == 0, found.output
    assert "self test: two workers trained the same weights as one process" in found.output
    assert found.output.rstrip().endswith("No problems found.")


@pytest.mark.integration
def test_the_self_test_can_be_left_out(ray_cluster: None) -> None:
    found = run("doctor", "--no-self-test")
    assert found.exit_code == 0, found.output
    assert "self test" not in found.output
    assert "CPUs" in found.output


@pytest.mark.integration
def test_a_cluster_that_is_not_there_is_a_problem() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen; nobody else can
        command = [sys.executable, "-m", "raysgd", "doctor", "--address", f"127.0.0.1:{bound.getsockname()[1]}"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert "problem  cluster: " in finished.stdout
    assert "`ray status`" in finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr


def test_the_doctor_exits_with_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", dict)
    found = run("doctor")
    assert found.exit_code == 1
    assert "Run: pip install ray" in found.output
    assert found.output.rstrip().endswith("Problems: 2.")  # nor is there a framework
