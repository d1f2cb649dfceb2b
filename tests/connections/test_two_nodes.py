"""Ranks on two nodes, which are network namespaces: gradients over the mesh, and a rank that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.stories import ROOT


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.connections.two_nodes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "cannot" in found:
        pytest.skip(f"this process may not make network namespaces: {found['cannot']}")
    return found


@pytest.mark.program
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_of_a_large_bucket_are_alike_on_all_ranks_and_those_of_one_process(
    found: dict[str, Any], when: str
) -> None:
    digests, distances = zip(*found[when], strict=True)
    assert len(set(digests)) == 1
    assert max(distances) < 1e-5


@pytest.mark.program
def test_ranks_of_both_nodes_notice_one_that_dies_and_go_on_with_another(found: dict[str, Any]) -> None:
    assert found["broken"] == ["MeshBroken"] * 3
    assert found["before"] == found["after"]
