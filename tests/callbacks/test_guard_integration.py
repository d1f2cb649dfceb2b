"""Bad batches on several workers: all leave the step out, also if one of them is killed.

Covers `raysgd.callbacks.guard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd.callbacks import Guard
from raysgd.exceptions import CallbackError
from raysgd.journal.journal import Journal
from raysgd.replay import replay, why
from raysgd.torch import TorchTrainer
from tests import bad_batches
from tests.bad_batches import INFINITE, NAN, SCALED, SIZE, Case, Manual, Stock

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    ray.cloudpickle.register_pickle_by_value(bad_batches)
    yield
    ray.cloudpickle.unregister_pickle_by_value(bad_batches)


@pytest.mark.parametrize("operator", [Stock, Manual])
def test_two_workers_leave_out_what_one_has_and_a_death_makes_no_difference(
    ray_cluster: None, operator: type[Stock]
) -> None:
    last = INFINITE if operator is Stock else NAN
    faults = {2 * SIZE: NAN, 8 * SIZE + SIZE - 1: last, 45 * SIZE + 1: SCALED, 47 * SIZE: NAN}
    assert bad_batches.problems(Case(operator, 2, 1, 50, faults, dies_at=8)) == []


def test_the_journal_names_the_rank_and_a_replay_has_the_bits(ray_cluster: None, tmp_path: Path) -> None:
    config = {"num_steps": 16, "faults": {5 * SIZE + SIZE - 1: INFINITE, 12 * SIZE: NAN}, "batch_size": SIZE}
    options: dict[str, Any] = {"config": config, "split_batches": True, "deterministic": True, "seed": 1}
    options |= {"scheduler_step_freq": "batch", "num_workers": 2}
    with TorchTrainer(training_operator_cls=Stock, **options) as trainer:
        history = trainer.fit(1, callbacks=[Guard(rewind=3)], folder=tmp_path)
        weights = trainer.state_dict()["models"][0]
    assert [(each.step, each.ranks, each.back_to) for each in Journal(tmp_path).left_out] == [
        (6, (1,), 0),
        (13, (0,), 9),
    ]
    assert why(history, 6).samples == (tuple(range(60, 66)), tuple(range(66, 72)))
    repeated = replay(history, 16, program=Stock, config={"faults": config["faults"]})
    assert repeated.is_exact, str(repeated)
    assert all(torch.equal(weights[name], each) for name, each in repeated.state["models"][0].items())


def test_sharded_models_leave_the_step_out_and_cannot_rewind(ray_cluster: None, tmp_path: Path) -> None:
    config = {"num_steps": 8, "faults": {3 * SIZE + SIZE - 1: NAN}, "batch_size": SIZE}
    options: dict[str, Any] = {"config": config, "split_batches": True, "scheduler_step_freq": "batch"}
    with TorchTrainer(training_operator_cls=Stock, strategy="fsdp", num_workers=2, **options) as trainer:
        trainer.fit(1, callbacks=[Guard(spike=50)], folder=tmp_path)
        assert all(bool(each.isfinite().all()) for each in trainer.get_model().parameters())
        with pytest.raises(CallbackError, match="omit `rewind`"):
            trainer.fit(2, callbacks=[Guard(rewind=2)])
    assert [(each.step, each.ranks) for each in Journal(tmp_path).left_out] == [(4, (1,))]


def test_workers_that_share_no_gradients_are_refused(ray_cluster: None) -> None:
    config = {"num_steps": 8, "faults": {}, "batch_size": SIZE}
    options: dict[str, Any] = {"config": config, "scheduler_step_freq": "batch", "strategy": "none"}
    with (
        TorchTrainer(training_operator_cls=Stock, num_workers=2, **options) as trainer,
        pytest.raises(CallbackError, match='`strategy="none"` shares none'),
    ):
        trainer.fit(1, callbacks=[Guard()])
