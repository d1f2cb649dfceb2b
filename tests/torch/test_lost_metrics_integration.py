"""The metrics of a call that lost workers cover all samples that trained the weights.

Covers `raysgd.torch.parallel.undo`, which needs a group of several processes.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from raysgd import Recovery, testing
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.torch import TorchTrainer
from tests.torch.ledger import Ledger, uses

pytestmark = pytest.mark.integration

NUM_STEPS = 20
NUM_SAMPLES = 12 * NUM_STEPS
OPTIONS: dict[str, Any] = {
    "num_cpus_per_worker": 0.5,
    "seed": 3,
    "recovery": Recovery(wait_for_workers=False, resize_interval_s=600.0),
}
MODES = [{"deterministic": True}, pytest.param({"split_batches": True}, marks=pytest.mark.soak)]


class Logs(Ledger):
    """Logs a metric of its own."""

    def forward(self, features: Any, target: Any) -> Any:
        self.log("mean_target", target.mean())
        return super().forward(features, target)


class OwnBatch(Ledger):
    """Reports what is known of a batch only when it is done: how many samples, and the sum of their numbers."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        metrics = super().train_batch(batch, batch_info)
        return {"number": batch[1].double().mean(), "one": 1.0, "num_samples": metrics["num_samples"]}


def in_peace_and_with_kills(
    operator_cls: type[Ledger], kills: dict[int, Any], num_workers: int = 3, **options: Any
) -> tuple[TorchTrainer, Any, Any]:
    """What a call returns without kills and with them: the step before which each happens, and the rank."""
    batch_size = 12 if options.get("split_batches") else 12 // num_workers
    config = {"num_samples": NUM_SAMPLES, "batch_size": batch_size, **options.pop("config", {})}
    trainer = TorchTrainer(
        training_operator_cls=operator_cls, num_workers=num_workers, config=config, **{**OPTIONS, **options}
    )
    before = trainer.state_dict()
    in_peace = trainer.train()
    trainer.load_state_dict(before)
    for step, rank in kills.items():
        testing.kill_worker(trainer, rank, at=f"step:{step}")
    return trainer, in_peace, trainer.train()


def losses(trainer: TorchTrainer) -> list[str]:
    """What became of each loss of workers."""
    return [event.kind for event in trainer.status().events if event.is_failure]


def assert_same(found: dict[str, Any], expected: dict[str, Any], is_exact: bool) -> None:
    assert found["num_samples"] == expected["num_samples"] == NUM_SAMPLES
    names = [name for name in expected if name != "batch_count" and not name.startswith("last_")]
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-12 if is_exact else 1e-6), name


@pytest.mark.parametrize("mode", MODES, ids=["deterministic", "global_batch"])
def test_after_several_losses_metrics_are_those_of_the_undisturbed_run(ray_cluster: None, mode: dict[str, Any]) -> None:
    chance = random.Random(str(mode))
    first, second = sorted(chance.sample(range(1, NUM_STEPS), 2))
    kills = {first: 2, second: chance.choice([0, 1])}
    trainer, in_peace, with_kills = in_peace_and_with_kills(Logs, kills, **mode)
    with trainer:
        assert losses(trainer) == ["continued"] * 2, kills
        assert uses(trainer) == {1}
        assert_same(with_kills, in_peace, is_exact="deterministic" in mode)


def test_the_samples_of_lost_workers_are_marked(ray_cluster: None) -> None:
    trainer, in_peace, _ = in_peace_and_with_kills(Logs, {}, 2, split_batches=True)
    with trainer:
        testing.kill_worker(trainer, 0, at="step:5")
        own, *others = trainer.train(reduce_results=False)
        assert losses(trainer) == ["continued"]
        assert not others
        assert (own["num_samples"], own["inherited_samples"]) == (NUM_SAMPLES, 5 * 6)
        assert own["mean_target"] == pytest.approx(in_peace["mean_target"], rel=1e-6)


@pytest.mark.parametrize(
    "is_large", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["over the mesh", "over gloo"]
)
def test_of_a_train_batch_of_the_users_the_last_batch_of_each_lost_rank_may_be_missing(
    ray_cluster: None, is_large: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kills, options = {6: 1, 13: 0}, {"split_batches": True, "config": {"is_large": is_large}}
    trainer, in_peace, with_kills = in_peace_and_with_kills(OwnBatch, kills, **options)
    with trainer:
        assert losses(trainer) == ["continued"] * 2
        assert uses(trainer) == {1}
        assert in_peace["num_samples"] == NUM_SAMPLES
        assert with_kills["num_samples"] == NUM_SAMPLES - 4 - 6
        assert with_kills["one"] == 1.0
        total = with_kills["number"] * with_kills["num_samples"]
        assert total == pytest.approx(round(total), abs=1e-6)
        assert f"cover {NUM_SAMPLES - 10} of {NUM_SAMPLES} samples" in caplog.text


class DiesAtTheEnd(WorkerCallback):
    """Ends the process of rank 0 when it has taken its last step, and has not answered."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        if operator.world_rank == 0 and self._note.exists():
            self._note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_die_at_any_other_time_lose_nothing_either(ray_cluster: None, tmp_path: Path) -> None:
    note = tmp_path / "rank 0 dies at the end"
    options = {"split_batches": True, "recovery": Recovery(wait_for_workers=True, resize_interval_s=None)}
    trainer, in_peace, with_kills = in_peace_and_with_kills(Ledger, {5: 2}, **options)
    with trainer:
        assert losses(trainer) == ["continued"]
        assert trainer.num_workers == 3, "a new worker stepped in"
        assert_same(with_kills, in_peace, is_exact=False)

        testing.kill_worker(trainer, 2, at="step:7")
        testing.kill_worker(trainer, 0, at="continue")
        assert trainer.train()["num_samples"] == NUM_SAMPLES

        note.touch()
        [row] = trainer.fit(1, callbacks=[DiesAtTheEnd(note)])
        assert row["num_samples"] == NUM_SAMPLES
        assert not note.exists()
        assert uses(trainer) == {3}


def test_a_restart_inside_a_call_knows_what_was_lost_before_its_snapshot(ray_cluster: None) -> None:
    options = {"split_batches": True, "recovery": Recovery(snapshot_every_n_steps=2)}
    trainer, in_peace, with_kills = in_peace_and_with_kills(
        Ledger,
        {4: 2, 9: [0, 1]},
        **options,
        config={"step_s": 0.2},  # time for a snapshot to arrive, but not for a new worker to be ready
    )
    with trainer:
        events = [event for event in trainer.status().events if event.is_failure]
        assert [event.kind for event in events] == ["continued", "restored"]
        assert events[1].detail.startswith("from a snapshot inside the call, after ")
        assert_same(with_kills, in_peace, is_exact=False)
