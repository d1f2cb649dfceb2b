"""How the cases for GPUs are run, and what is said of those that cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.cases import CASES, CannotRun, Case, Machine
from tests.gpu.run import ranks_on_a_gpu, run_apart, run_here


def named(name: str) -> Case:
    [case] = [case for case in CASES if case.name == name]
    return case


def test_every_case_has_a_name_and_a_part_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    assert sorted({case.part for case in CASES}) == [1, 2, 3, 4, 5]


def test_a_case_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "num_gpus", 0)
    result = run_here(named("numbers of 4 ranks in bf16"), "cuda", "nccl")
    assert result == {"status": "cannot run", "why": "PyTorch sees no GPU"}


def test_ranks_that_share_a_gpu_need_nccl_that_lets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Machine, "num_gpus", 2)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    machine = Machine("cuda", "nccl", tmp_path)
    machine.check(2)
    with pytest.raises(
        CannotRun, match=r"4 ranks on 2 GPU\(s\): NCCL runs several ranks on one GPU only from version 2.30"
    ):
        machine.check(4)
    options = Machine("cuda", "gloo", tmp_path).options(4)
    assert (options["num_gpus_per_worker"], options["use_gpu"], options["backend"]) == (0.5, True, "gloo")
    assert ranks_on_a_gpu(named("8 -> 5"), 2) == 4


def test_a_case_that_hangs_is_ended_with_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the harness: the process that hangs is another one."""
    real = subprocess.Popen
    hanging = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR2); time.sleep(600)"
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: real([sys.executable, "-c", hanging], **options)
    )
    result = run_apart(CASES[0], "cpu", "gloo", dict(os.environ), limit_s=4.0)
    assert result["status"] == "hung"
    assert "most recent call first" in result["output"]
