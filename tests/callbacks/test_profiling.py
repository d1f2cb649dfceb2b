from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks import ProfilerTrace
from raysgd.torch import TorchTrainer


def steps_in(path: Path) -> int:
    """How many times the optimizer stepped in a trace."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return sum(name.startswith("Optimizer.step#") for name in names)


@pytest.mark.parametrize(("steps", "expected"), [((1, 4), 3), ((0, 1), 1), ((3, 99), 2), ((6, 8), 2)])
def test_the_steps_of_a_trace(
    make_local: Callable[..., TorchTrainer], tmp_path: Path, steps: tuple[int, int], expected: int
) -> None:
    make_local().fit(2, callbacks=[ProfilerTrace(tmp_path, steps)])
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]
    assert steps_in(tmp_path / "rank0.json") == expected


def test_ranks_are_chosen(make_local: Callable[..., TorchTrainer], tmp_path: Path) -> None:
    make_local().fit(1, callbacks=[ProfilerTrace(tmp_path, ranks=[1])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [[-1], ["0"], [True], [], "0", 0])
def test_ranks_are_a_list_of_numbers(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`ranks=.*need a list of ranks"):
        ProfilerTrace(tmp_path, ranks=ranks)


@pytest.mark.parametrize("steps", [(3, 3), (-1, 2), 5, (1, 2, 3), ("a", "b")])
def test_steps_are_a_pair(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`steps="):
        ProfilerTrace(tmp_path, steps)
