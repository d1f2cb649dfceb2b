"""What `raysgd doctor` makes of what it finds. `tests/cli/test_main.py` has the self test with real workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.cli import doctor
from raysgd.core.private_names import PrivateNames

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 9), "problem"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "note"), ((3, 15), "problem")],
)
def test_python_is_one_of_the_supported_ones(version: tuple[int, int], level: str) -> None:
    assert doctor.check_python(version).level == level


@pytest.mark.parametrize(
    ("versions", "problems"),
    [
        ({"ray": "2.44.0", "torch": "2.10.0+cu128"}, []),
        ({"ray": "2.60.0", "tensorflow": "2.21.0"}, []),
        ({"ray": "2.43.0", "torch": "2.13.0"}, ["ray 2.43.0 is too old"]),
        ({"ray": "2.60.0", "torch": "2.10.0rc1", "lightning": "1.9"}, ["lightning 1.9 is too old"]),
        ({"torch": "2.10"}, ["ray is not installed"]),
        ({"ray": "2.44"}, ["neither PyTorch nor TensorFlow is installed"]),
        ({}, ["ray is not installed", "neither PyTorch nor TensorFlow is installed"]),
    ],
)
def test_packages_are_there_and_recent_enough(versions: Mapping[str, str], problems: list[str]) -> None:
    found = list(doctor.check_packages(versions))
    assert [finding.text for finding in found if finding.level == "problem"] == problems
    assert all(finding.advice.startswith("Run: pip install") for finding in found if finding.level == "problem")


@pytest.mark.long
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_version_that_steals_credentials_is_named_without_importing_it(tmp_path: Path, version: str) -> None:
    for name in ("lightning", "pytorch_lightning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    info = tmp_path / f"lightning-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lightning\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "RAY_ADDRESS": "h:1"}
    command = [sys.executable, "-m", "raysgd", "doctor", "--no-self-test"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    output = " ".join(done.stdout.split())
    assert f"lightning {version} was published by a stranger, and steals credentials on import" in output, done.stderr
    assert 'pip install --upgrade "lightning>=2.5.2,!=2.6.2,!=2.6.3"' in output
    assert done.returncode == 1
    assert not (tmp_path / "imported").exists()


def test_the_installed_versions_are_those_of_the_environment() -> None:
    import torch

    found = doctor.installed_versions()["torch"]
    assert torch.__version__.startswith(found)  # which may name a build, such as `+cu130`


def a_torch(num_gpus: int, cuda: str | None) -> Any:
    gpus = SimpleNamespace(
        is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus, get_device_name=lambda index: "H100"
    )
    return SimpleNamespace(cuda=gpus, version=SimpleNamespace(cuda=cuda), __version__="2.13.0")


@pytest.mark.parametrize(
    ("torch", "has_driver", "level", "text", "advice"),
    [
        (a_torch(2, "12.8"), True, "ok", "2 (H100), CUDA 12.8", ""),
        (a_torch(0, None), False, "note", "none on this machine", ""),
        (a_torch(0, None), True, "note", "was built without CUDA", "a build of PyTorch with CUDA"),
        (a_torch(0, "12.8"), True, "note", "sees none", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_are_not_used_are_pointed_out(
    torch: Any, has_driver: bool, level: str, text: str, advice: str
) -> None:
    found = doctor._finding_on_gpus(torch, has_driver)
    assert found.level == level
    assert text in found.text
    assert advice in found.advice


def test_private_names_that_are_gone_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.level for found in doctor.check_private_names()] == ["ok"]
    gone = PrivateNames("torch.optim.optimizer:Optimizer", ("_gone", "step"), "torch", "schedules start over")
    monkeypatch.setattr(doctor, "private_names", lambda: (gone,))
    monkeypatch.setitem(doctor.versions_tested(), "torch", "99")
    assert [found.level for found in doctor.check_private_names()] == ["ok"], "older versions may lack some"
    monkeypatch.setitem(doctor.versions_tested(), "torch", "2.9")
    (found,) = doctor.check_private_names()
    assert found.level == "note"
    assert found.text.endswith("torch has no `_gone` in `torch.optim.optimizer:Optimizer`: schedules start over")
    assert found.advice == 'Run: pip install "torch<=2.9"'


def test_an_address_where_no_one_can_listen_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_own_address", lambda: "203.0.113.1")  # an address for documents, not of this machine
    found = doctor.check_ports()
    assert found.level == "problem"
    assert "firewall" in found.advice


def test_shared_memory_that_cannot_be_looked_at_is_a_note() -> None:
    assert doctor.check_shared_memory("/no/such/folder").level == "note"
    assert "MiB" in doctor.check_shared_memory("/").text


@pytest.mark.parametrize(
    ("total", "free", "level", "advice"),
    [
        ({"CPU": 4.0}, {"CPU": 2.0}, "ok", ""),
        ({"CPU": 1.0}, {"CPU": 1.0}, "problem", "add nodes"),
        ({"CPU": 4.0}, {"CPU": 1.0}, "problem", "Other programs"),
        ({"CPU": 4.0}, {}, "problem", "Other programs"),
        ({}, {}, "problem", "add nodes"),
    ],
)
def test_two_workers_need_two_free_cpus(
    total: Mapping[str, float], free: Mapping[str, float], level: str, advice: str
) -> None:
    found = doctor.finding_on_resources(1, total, free)
    assert found.level == level
    assert advice in found.advice


def test_the_advice_depends_on_whose_cluster_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "`ray status`" in doctor._advice_on_connection("10.0.0.1:6379")
    assert "`ray stop`" in doctor._advice_on_connection(None)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (RuntimeError("no route\nsecond line"), "fails: RuntimeError: no route"),
        (({"two steps": 0.04}, False), "do not train the same weights as one process (two steps 0.04 s)"),
    ],
)
def test_a_self_test_that_goes_wrong_is_a_problem(outcome: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(doctor, "_train_on_two_workers", train)
    found = doctor.run_self_test({"torch": "2.10.0"}, [])
    assert found.level == "problem"
    assert text in found.text
    assert found.advice


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"ray": "2.40.0", "torch": "2.10.0"}, "packages are too old or missing"),  # these workers would crash
        ({"ray": "2.60.0", "tensorflow": "2.21.0"}, "it needs PyTorch"),
        ({"ray": "2.60.0", "torch": "2.10.0"}, "two workers trained"),
    ],
)
def test_the_self_test_runs_with_packages_that_can_train(
    versions: Mapping[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_train_on_two_workers", lambda: ({"two steps": 0.04}, True))
    assert text in doctor.run_self_test(versions, doctor.check_packages(versions)).text
