"""Programs that signals end, and that are started again until they are done. `python -m tests.signals` makes many."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.signals import __main__ as signals
from tests.signals.__main__ import ROOT, Sums, difference, disturbed, in_peace

ARGUMENTS = ["--epochs", "4", "--workers", "2"]


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs the program `timeout`")
def test_a_program_under_timeout_is_done_some_day_and_is_the_one_that_ran_in_peace(tmp_path: Path) -> None:
    """`timeout` sends the signal to all processes of the program, Ray's own included."""
    for name in ("whole", "left"):
        (tmp_path / name).mkdir()
    wanted = in_peace(tmp_path / "whole", ARGUMENTS)
    seconds = 6.0  # less than 80 steps of 0.1 s take, so the first program is ended on any machine
    program = [sys.executable, "-m", "tests.signals.program", str(tmp_path / "left"), *ARGUMENTS, "--step-s", "0.1"]
    statuses = []
    while not (tmp_path / "left" / "done.pt").exists() and len(statuses) < 12:
        ended = subprocess.run(["timeout", "-s", "TERM", str(seconds), *program], cwd=ROOT, check=False)
        statuses.append(ended.returncode)
        seconds += 4.0  # on a busy machine the start alone may take as long
    assert 124 in statuses, "it was ended at least once"
    found = torch.load(tmp_path / "left" / "done.pt", weights_only=False)
    assert difference(found, wanted, 0.0) is None


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["plain", "accumulate"])
@pytest.mark.parametrize("workers", [[2], [3, 2, 4]], ids=str)
def test_no_step_is_lost_whatever_ends_the_program(kind: str, workers: list[int], tmp_path: Path) -> None:
    arguments, sums, rng = ["--kind", kind, "--epochs", "5"], Sums(), random.Random(7)
    for name in ("whole", "left"):
        (tmp_path / name).mkdir()
    wanted = in_peace(tmp_path / "whole", [*arguments, "--workers", str(workers[0])])
    found = disturbed(tmp_path / "left", arguments, workers, rng, sums, list(signals.KINDS), 25)
    assert not sums.faults, str(sums)
    assert found is not None
    assert difference(found, wanted, 0.0 if len(workers) == 1 else 1e-5) is None
