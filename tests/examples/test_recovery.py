"""What `examples/benchmarks/recovery.py` makes of the steps that workers note, and torchft in its own environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

KILLED_AT = 100.0


@pytest.fixture
def recovery(benchmark: Any) -> Any:
    return benchmark("recovery")


def figures(recovery: Any, folder: Path, *steps: list[float]) -> dict[str, float]:
    (folder / "killed-75").write_text(repr(KILLED_AT))
    (folder / "steps-1").write_text("\n".join(json.dumps(step) for step in steps))
    return {name: value for name, [value] in recovery.read_stamps(str(folder)).items()}


def test_what_counts_is_the_first_step_behind_the_death(recovery: Any, tmp_path: Path) -> None:
    steps = ([74, 98.0, 99.0, 2], [60, 102.0, 102.5, 2], [61, 102.5, 103.0, 2])
    assert figures(recovery, tmp_path, *steps) == pytest.approx(
        {"recovery_s": 2.5, "full_size_s": 2.5, "batches_again": 15, "batches_lost": 0}
    )


def test_a_step_that_waited_for_the_dead_one_and_went_on_without_it_counts(recovery: Any, tmp_path: Path) -> None:
    steps = ([75, 99.9, 100.4, 1], [76, 100.4, 100.5, 1], [80, 101.5, 101.75, 2])
    found = figures(recovery, tmp_path, *steps)
    assert found == pytest.approx({"recovery_s": 0.4, "full_size_s": 1.75, "batches_again": 0, "batches_lost": 0})


def test_batches_in_no_weights_are_lost_and_no_steps(recovery: Any, tmp_path: Path) -> None:
    steps = ([75, 100.1, 100.2, 0], [75, 105.0, 105.5, 2], [76, 105.0, 105.5, 0])
    found = figures(recovery, tmp_path, *steps)
    assert (found["recovery_s"], found["batches_lost"]) == (pytest.approx(5.5), 2)


def test_a_training_that_no_one_continued_has_no_figures(recovery: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no step began after the kill; 1 steps were noted before"):
        figures(recovery, tmp_path, [74, 98.0, 99.0, 2])


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("peer", ["torchft", "torchft_tuned"])
def test_torchft_goes_on_after_a_loss(peer: str, recovery: Any) -> None:
    if not recovery.TORCHFT.exists():
        pytest.skip("needs the environment of torchft, which `make bench` creates")
    [seconds] = recovery.run_torchft("recovery_tiny", peer)["recovery_s"]
    assert seconds > 0
