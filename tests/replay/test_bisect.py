"""The first difference of two runs: the step is named, whatever differs in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.callbacks import Checkpointing
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.replay import bisect
from raysgd.torch import TorchTrainer
from tests.replay.programs import Changed

Make = Callable[..., TorchTrainer]


class FlipBit(WorkerCallback):
    """Flips the lowest bit of the exponent of a gradient in one step, as a broken memory does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        if operator.global_step + 1 == self.step:
            gradient = operator.model[0].weight.grad.view(-1)
            largest = int(gradient.abs().argmax())
            gradient.view(torch.int32)[largest] ^= 1 << 23


def run(make_local: Make, folder: Path, config: dict[str, Any], *callbacks: Any, **options: Any) -> Path:
    saving = Checkpointing(keep_last=None)
    options = {"seed": 5, "split_batches": True, "deterministic": True, **options}
    make_local(Changed, config=config, **options).fit(3, folder=folder, callbacks=[saving, *callbacks])
    return folder


def planted(make_local: Make, folder: Path, kind: str, step: int) -> Path:
    if kind == "flip":
        return run(make_local, folder, {}, FlipBit(step))
    return run(make_local, folder, {f"{kind}_at": step})


@pytest.mark.parametrize("kind", ["row", "rate", "flip"])
@pytest.mark.parametrize("step", [1, 14, 20, 21])
def test_the_step_of_a_difference_is_named(make_local: Make, tmp_path: Path, kind: str, step: int) -> None:
    check(make_local, tmp_path, kind, step)


@pytest.mark.soak
def test_fifty_differences_at_random_places_are_named(make_local: Make, tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(50):
        (tmp_path / str(number)).mkdir()
        check(make_local, tmp_path / str(number), chance.choice(["row", "rate", "flip"]), chance.randint(1, 28))


def check(make_local: Make, folder: Path, kind: str, step: int) -> None:
    runs = run(make_local, folder / "a", {}), planted(make_local, folder / "b", kind, step)
    found = bisect(*runs, program=Changed)
    assert found.step == step, f"{kind} in step {step}: {found}"
    assert found.what == ("loss" if kind == "row" else "weights")
    assert found.left == ("B" if kind == "flip" else None)
    assert (found.parameter is not None) == (kind != "flip")
    last_equal = (step - 1) // 10 * 10
    assert found.equal_at == (last_equal or None)
    assert found.different_at == last_equal + 10
    by_files = bisect(*runs)
    if step == found.different_at and kind != "row":  # the checkpoints after this step differ, and the losses later
        assert (by_files.step, by_files.what) == (step, "weights")
        return
    assert by_files.step == step + (kind != "row")
    assert by_files.what == "loss"
    assert "`--program` trains the steps again" in str(by_files)


def test_equal_runs_have_no_difference(make_local: Make, tmp_path: Path) -> None:
    first, second = (run(make_local, tmp_path / name, {}) for name in "ab")
    found = bisect(first, second, program=Changed)
    assert (found.step, found.num_steps, found.equal_at, found.different_at) == (None, 30, 30, None)
    assert str(found) == "no difference in 30 steps\ncheckpoints: the same weights after step 30"


def test_other_samples_are_named_first(make_local: Make, tmp_path: Path) -> None:
    first, second = run(make_local, tmp_path / "a", {}), run(make_local, tmp_path / "b", {"batch_size": 10})
    found = bisect(first, second, program=Changed)
    assert (found.step, found.what) == (1, "samples")
    assert str(found).splitlines()[0] == "step 1: the samples differ"


def test_a_norm_differs_in_the_step_of_the_gradient(make_local: Make, tmp_path: Path) -> None:
    first = run(make_local, tmp_path / "a", {}, clip_grad_norm=5.0)
    second = run(make_local, tmp_path / "b", {}, FlipBit(12), clip_grad_norm=5.0)
    found = bisect(first, second, program=Changed)
    assert (found.step, found.what, found.left) == (12, "norm", "B")
    one, other = found.values or (0.0, 0.0)
    assert one != other


def test_runs_without_a_common_step_are_refused(make_local: Make, tmp_path: Path) -> None:
    first = run(make_local, tmp_path / "a", {})
    (tmp_path / "b" / "journal").mkdir(parents=True)
    (tmp_path / "b" / "journal" / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step in common"):
        bisect(first, tmp_path / "b")
