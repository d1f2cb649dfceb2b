"""The cases for GPUs, each in a process of its own, and some of them on CPUs, to check the cases themselves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from tests.gpu.cases import CASES
from tests.gpu.run import run_apart
from tests.helpers.run_if import RunIf

ON_CPUS = [
    "an abort after a kill in an all-reduce of 2 ranks",
    "numbers of 2 ranks in fp32",
    "a kill inside the first and the last bucket",
    "FSDP: 2 ranks, then 4",
]


def found(name: str, device: str, backend: str) -> dict[str, Any]:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    [case] = [case for case in CASES if case.name == name]
    return run_apart(case, device, backend, environment, limit_s=300.0)


@RunIf(cuda=True)
@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_holds_on_gpus(name: str, ray_cluster: None) -> None:
    result = found(name, "cuda", "nccl")
    if result["status"] == "cannot run":
        pytest.skip(result["why"])
    assert result["status"] == "passed", result


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.parametrize("name", ON_CPUS)
def test_a_case_holds_on_cpus(name: str, ray_cluster: None) -> None:
    result = found(name, "cpu", "gloo")
    assert result["status"] == "passed", result.get("output")
