"""The first difference of two runs: the step is named, whatever differs in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.callbacks import Checkpointing
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.journal.steps import CHECKS_FILE, STEPS
from raysgd.replay import bisect
from raysgd.torch import TorchTrainer
from tests.journal.made import HEADER
from tests.replay.programs import Changed, Normed
from tests.torch.operators_for_tests import LinearOperator

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


class DoubleGradient(FlipBit):
    """Doubles the gradients of one step."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        if operator.global_step + 1 == self.step:
            for parameter in operator.model.parameters():
                parameter.grad *= 2


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


IN_PARTS: dict[str, Any] = {"deterministic": False, "micro_batch_size": 5}
"""Adds up each batch in another order, as another number of workers does."""


@pytest.mark.parametrize("options", [{}, {"deterministic": False}])
def test_rounding_is_no_difference(make_local: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = run(make_local, tmp_path / "a", {}, **options), run(make_local, tmp_path / "b", {}, **IN_PARTS)
    for program in (None, Changed):
        found = bisect(first, second, program=program)
        assert (found.step, found.left) == (None, None), str(found)
        assert str(found).splitlines()[0] == "no difference in 30 steps that rounding does not explain"
        assert "if both runs have `deterministic=True` and the same `num_workers`" in str(found)


@pytest.mark.parametrize("kind", ["row", "rate", "flip"])
@pytest.mark.parametrize("options", [{"deterministic": False}, IN_PARTS])
def test_a_difference_is_named_without_bits_too(
    make_local: Make, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    step, config = 14, {} if kind == "flip" else {f"{kind}_at": 14}
    first = run(make_local, tmp_path / "a", {}, deterministic=False)
    callbacks = [FlipBit(step)] if kind == "flip" else []
    second = run(make_local, tmp_path / "b", config, *callbacks, **options)
    found = bisect(first, second, program=Changed)
    if kind == "row":
        assert (found.step, found.what, found.left) == (step, "loss", None), str(found)
    elif kind == "flip":
        assert (found.step, found.what, found.left) == (step, "weights", "B"), str(found)
    elif options == IN_PARTS:  # two orders of sums have no bits to compare, so the loss after the update is the first
        assert (found.step, found.what, found.left) == (step + 1, "loss", None), str(found)
    else:
        assert (found.step, found.what, found.left) == (step, "weights", None), str(found)


@pytest.mark.parametrize("options", [{}, {"deterministic": False}])
def test_no_run_is_named_if_both_left_their_program(make_local: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    first = run(make_local, tmp_path / "a", {}, FlipBit(14), **options)
    second = run(make_local, tmp_path / "b", {}, DoubleGradient(14), **options)
    found = bisect(first, second, program=Changed)
    assert (found.step, found.what, found.left) == (15, "loss", None)
    assert "run A differs from its replay from step 15 on and run B differs from its replay from step 15 on" in str(
        found
    )
    assert "only with `deterministic=True`, and never what callbacks change" in str(found)


def test_two_runs_that_equal_their_replays_are_one_program(make_local: Make, tmp_path: Path) -> None:
    for name, factor in (("a", 1 - 7e-6), ("b", 1 + 7e-6)):
        file = run(make_local, tmp_path / name, {}, deterministic=False) / "journal" / "steps.bin"
        steps = np.fromfile(file, STEPS)
        steps["loss"][15] *= factor
        steps.tofile(file)
        file.with_name(CHECKS_FILE).unlink()
    assert bisect(tmp_path / "a", tmp_path / "b").step == 16
    found = bisect(tmp_path / "a", tmp_path / "b", program=Changed)
    assert (found.step, found.left) == (None, None)
    assert "step 16 differ, but the replays of both runs are equal, and each run equals its replay" in str(found)


def test_the_last_update_of_a_run_is_compared_with_its_checkpoint(make_local: Make, tmp_path: Path) -> None:
    first, second = run(make_local, tmp_path / "a", {}), run(make_local, tmp_path / "b", {}, FlipBit(30))
    found = bisect(first, second, program=Changed)
    assert (found.step, found.what, found.left) == (30, "weights", "B")


def test_statistics_of_batch_norms_are_no_weights(make_local: Make, tmp_path: Path) -> None:
    """They follow the batches of each process, so they depend on the number of workers."""
    for name in "ab":
        trainer = make_local(Normed, seed=5, split_batches=True, deterministic=True)
        trainer.fit(1, folder=tmp_path / name, callbacks=[Checkpointing(keep_last=None)])
    file = next((tmp_path / "b" / "checkpoints").glob("*.ckpt"))
    state = torch.load(file, weights_only=False)
    state["models"][0]["1.running_mean"] += 1
    torch.save(state, file)
    assert bisect(tmp_path / "a", tmp_path / "b").step is None


def test_the_seed_of_data_in_their_own_order_changes_no_samples(make_local: Make, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_local(LinearOperator, seed=seed).fit(1, folder=tmp_path / str(seed))
    found = bisect(tmp_path / "1", tmp_path / "2")
    assert found.what != "samples"


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
    (tmp_path / "b" / "journal" / "journal.jsonl").write_text(f"{json.dumps({'kind': 'run', 'format': 1, **HEADER})}\n")
    with pytest.raises(ValueError, match="no step in common"):
        bisect(first, tmp_path / "b")
