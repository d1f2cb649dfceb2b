"""A step of four workers, trained again in one process: the same bits.

Covers `raysgd.replay.replaying` and `raysgd.replay.program`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd import Recovery
from raysgd.callbacks import Checkpointing
from raysgd.journal.journal import Journal
from raysgd.replay import bisect, find_jumps, replay, why
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints import checkpoint_file
from tests.journal.test_journal_integration import Kill
from tests.replay import programs
from tests.replay.programs import Noisy, Normed, OwnBatch, Plain, Rectified, Scheduled, Watching

pytestmark = pytest.mark.integration

OPTIONS: dict[str, Any] = {"use_gpu": False, "num_cpus_per_worker": 0.5, "seed": 7}


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    ray.cloudpickle.register_pickle_by_value(programs)
    yield
    ray.cloudpickle.unregister_pickle_by_value(programs)


def weights_after(folder: Path, step: int, steps_of_epoch: int) -> dict[str, torch.Tensor]:
    epoch, inside = divmod(step, steps_of_epoch)
    name = f"epoch_{epoch:04d}_step_{inside:06d}.ckpt" if inside else f"epoch_{epoch:04d}.ckpt"
    found: dict[str, torch.Tensor] = checkpoint_file.read(folder / "checkpoints" / name)["models"][0]
    return found


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Compare the bits of weights. The buffers of a batch normalization follow the batches of each process."""
    names = [name for name in one if "running" not in name and "tracked" not in name]
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (Plain, {"clip_grad_norm": 0.5}),
        (Normed, {"split_batches": True}),
        (Noisy, {"split_batches": True, "config": {"noise": 0.1}}),
        (Scheduled, {"split_batches": True, "scheduler_step_freq": "batch"}),
        (Watching, {"scheduler_step_freq": "epoch"}),
        (OwnBatch, {"split_batches": True, "micro_batch_size": 3}),
    ],
)
def test_one_process_has_the_bits_of_four_workers_after_each_step(
    ray_cluster: None, tmp_path: Path, program: Any, options: dict[str, Any]
) -> None:
    saving = Checkpointing(every_n_steps=1, keep_last=None)
    options = {**OPTIONS, **options, "num_workers": 4, "deterministic": True}
    with TorchTrainer(training_operator_cls=program, **options) as trainer:
        num_steps = 10 if options.get("split_batches") else 3
        history = trainer.fit(20 // num_steps + 1, folder=tmp_path, callbacks=[saving])
    for begin, step in [(0, 20), (0, 1), (5, 6), (num_steps, num_steps + 1), (13, 19), (num_steps - 1, num_steps)]:
        found = replay(history, step, program=program, begin=begin)
        assert found.is_exact, str(found)
        assert found.begin == begin
        assert are_equal(found.state["models"][0], weights_after(tmp_path, step, num_steps))


def test_kills_and_a_resize_make_no_difference(ray_cluster: None, tmp_path: Path) -> None:
    options = {**OPTIONS, "num_workers": 3, "deterministic": True, "split_batches": True}
    recovery = Recovery(wait_for_workers=False, resize_interval_s=600.0)
    callbacks = [Kill(2, "step:4"), Checkpointing(keep_last=None)]
    with TorchTrainer(training_operator_cls=Normed, recovery=recovery, **options) as trainer:
        trainer.fit(3, folder=tmp_path, callbacks=callbacks)
    found = replay(tmp_path, 30, program=Normed, begin=0)
    assert found.is_exact, str(found)
    assert set(found.incomplete) <= {11, 12, 13, 14}
    assert are_equal(found.state["models"][0], weights_after(tmp_path, 30, 10))


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
def test_without_deterministic_the_weights_are_those_of_the_run_up_to_rounding(
    ray_cluster: None, tmp_path: Path, options: dict[str, Any]
) -> None:
    with TorchTrainer(training_operator_cls=Plain, num_workers=3, **OPTIONS, **options) as trainer:
        trainer.fit(3, folder=tmp_path, callbacks=[Checkpointing(keep_last=None)])
        num_steps = 10 if options else 4
    found = replay(tmp_path, 3 * num_steps, program=Plain, begin=0)
    assert found.is_same, str(found)
    assert "rounding explains" in str(found) or found.is_exact
    weights = weights_after(tmp_path, 3 * num_steps, num_steps)
    for name, tensor in found.state["models"][0].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


def test_a_resize_that_changed_the_global_batch_is_replayed(ray_cluster: None, tmp_path: Path) -> None:
    recovery = Recovery(wait_for_workers=False, resize_interval_s=600.0)
    with TorchTrainer(training_operator_cls=Plain, recovery=recovery, num_workers=3, **OPTIONS) as trainer:
        trainer.fit(3, folder=tmp_path, callbacks=[Kill(2, "step:1")])
    numbers = {leg.num_workers: leg.after for leg in Journal(tmp_path).legs}
    assert [*numbers] == [3, 2]
    found = replay(tmp_path, Journal(tmp_path).last_step, program=Plain)
    assert (found.begin, found.is_same) == (0, True), str(found)


def test_a_run_that_resumed_on_other_workers_has_the_bits_of_its_replay(ray_cluster: None, tmp_path: Path) -> None:
    options = {**OPTIONS, "deterministic": True, "split_batches": True}
    for num_workers, num_steps in ((2, 7), (3, 24)):
        with TorchTrainer(training_operator_cls=Noisy, num_workers=num_workers, **options) as trainer:
            saving = Checkpointing(keep_last=None)
            trainer.fit(3, max_steps=num_steps, folder=tmp_path, callbacks=[saving], resume_from="auto")
    found = replay(tmp_path, 24, program=Noisy, begin=0)
    assert (found.begin, found.is_exact) == (0, True), str(found)


@pytest.mark.parametrize(
    ("program", "expected", "said"),
    [
        (Plain, (None, None), "no difference in 20 steps that rounding does not explain"),
        (Noisy, (1, "loss"), "run B differs from its replay from step 1 on: a replay has the dropout"),
        (Normed, (1, "loss"), "run B differs from its replay from step 1 on: a replay has the dropout"),
    ],
)
def test_another_number_of_workers_is_no_fault_of_a_run(
    ray_cluster: None, tmp_path: Path, program: Any, expected: Any, said: str
) -> None:
    folders = {num_workers: tmp_path / str(num_workers) for num_workers in (1, 3)}
    for num_workers, folder in folders.items():
        options = {**OPTIONS, "num_workers": num_workers, "split_batches": True}
        with TorchTrainer(training_operator_cls=program, **options) as trainer:
            trainer.fit(2, folder=folder, callbacks=[Checkpointing(keep_last=None)])
    found = bisect(*folders.values(), program=program)
    assert (found.step, found.what, found.left) == (*expected, None), str(found)
    assert said in str(found)
    by_files = bisect(*folders.values())
    assert (by_files.step, by_files.what) == expected
    assert ("the runs had 1 and 3 workers: dropout and batch norms" in str(by_files)) == (expected[0] is not None)


@pytest.mark.parametrize(("kind", "num_workers"), [("nan", 2), ("scale", 3), ("label", 2)])
def test_a_bad_row_is_found_without_being_told_the_step(
    ray_cluster: None, tmp_path: Path, kind: str, num_workers: int
) -> None:
    row = 77
    options: dict[str, Any] = {**OPTIONS, "num_workers": num_workers, "split_batches": True}
    config = {"bad": {str(row): kind}, "lr": 0.05}
    with TorchTrainer(training_operator_cls=Rectified, config=config, clip_grad_norm=1.0, **options) as trainer:
        trainer.fit(6, folder=tmp_path, callbacks=[Kill(1, "step:3"), Checkpointing(keep_last=None)])
    steps = [
        step for step in range(1, 61) if row in [each for own in why(tmp_path, step).samples or () for each in own]
    ]
    assert len(steps) == 6, "each epoch has it once"
    jumps, wrong = find_jumps(tmp_path).jumps, steps[-1]
    if kind != "label":
        wrong = jumps[0].first
        assert {jump.first for jump in jumps} <= {*steps}
        assert kind == "scale" or wrong == steps[0], "a scaled row may happen to fit its label"
    found = why(tmp_path, wrong, program=Rectified, recompute=True)
    assert found.losses is not None
    assert row in [each.sample for each in found.losses[:5]]
