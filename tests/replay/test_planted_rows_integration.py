"""A hundred bad rows in runs on 1 to 4 workers that are killed, found without being told the step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle

from raysgd import Recovery
from raysgd.callbacks import Checkpointing
from raysgd.journal.journal import Journal
from raysgd.replay import find_jumps, why
from raysgd.torch import TorchTrainer
from tests.journal.test_journal_integration import Kill
from tests.replay import programs
from tests.replay.programs import Plain, Regression

pytestmark = [pytest.mark.integration, pytest.mark.soak]

NUM_SAMPLES = 480
STEPS_OF_EPOCH = 40
RECOVERY = Recovery(wait_for_workers=False, resize_interval_s=600.0)


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    ray.cloudpickle.register_pickle_by_value(programs)
    yield
    ray.cloudpickle.unregister_pickle_by_value(programs)


def train(folder: Path, program: Any, kind: str, number: int, num_rows: int) -> list[int]:
    """Train with some bad rows, on 1 to 4 workers. All but one are killed at some time. Return the rows."""
    chance, num_workers = random.Random(f"{kind}{number}"), 1 + number % 4
    rows = chance.sample(range(NUM_SAMPLES), num_rows)
    config = {"bad": {str(row): kind for row in rows}, "num_samples": NUM_SAMPLES, "lr": 0.05}
    callbacks: list[Any] = [Checkpointing(keep_last=None)]
    if num_workers > 1:
        callbacks.append(Kill(chance.randrange(num_workers), f"step:{chance.randrange(STEPS_OF_EPOCH)}"))
    options: dict[str, Any] = {"num_workers": num_workers, "use_gpu": False, "num_cpus_per_worker": 0.5}
    options |= {"split_batches": True, "clip_grad_norm": 1.0, "recovery": RECOVERY, "config": config}
    with TorchTrainer(training_operator_cls=program, seed=number, **options) as trainer:
        trainer.fit(3, folder=folder, callbacks=callbacks)
    return rows


def rows_of(folder: Path, step: int) -> set[int]:
    return {row for own in why(folder, step).samples or () for row in own}


@pytest.mark.parametrize("number", range(34))
def test_a_row_of_nans_is_the_first_jump(ray_cluster: None, tmp_path: Path, number: int) -> None:
    (row,) = train(tmp_path, Plain, "nan", number, 1)
    jump = find_jumps(tmp_path).jumps[0]
    assert row in rows_of(tmp_path, jump.first)
    losses = why(tmp_path, jump.first, program=Plain, recompute=True).losses or ()
    assert row in [each.sample for each in losses if each.loss != each.loss]


@pytest.mark.parametrize("number", range(11))
def test_three_scaled_rows_are_jumps_and_nothing_else_is(ray_cluster: None, tmp_path: Path, number: int) -> None:
    rows = {*train(tmp_path, Regression, "scale", number, 3)}
    jumps = find_jumps(tmp_path).jumps
    assert all(rows & rows_of(tmp_path, jump.first) for jump in jumps), "a false alarm"
    found = {row for jump in jumps for step in range(jump.first, jump.last + 1) for row in rows_of(tmp_path, step)}
    assert rows <= found


@pytest.mark.parametrize("number", range(11))
def test_three_wrong_labels_are_among_the_five_highest_losses(ray_cluster: None, tmp_path: Path, number: int) -> None:
    rows = train(tmp_path, Plain, "label", number, 3)
    last = Journal(tmp_path).last_step
    for row in rows:
        step = next(step for step in range(last, last - STEPS_OF_EPOCH, -1) if row in rows_of(tmp_path, step))
        losses = why(tmp_path, step, program=Plain, recompute=True).losses or ()
        assert row in [each.sample for each in losses[:5]]
