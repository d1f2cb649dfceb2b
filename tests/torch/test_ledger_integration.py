"""Where the time of two real workers goes, across a loss of one of them."""

from __future__ import annotations

import time

import pytest

from raysgd import testing
from raysgd.core.numbers.timing import TimeLedger
from raysgd.torch import TorchTrainer
from tests.torch.ledger import BATCH_SIZE_OF_ONE, NUM_SAMPLES, Ledger

pytestmark = pytest.mark.integration

STEP_S, NUM_STEPS = 0.01, NUM_SAMPLES // (2 * BATCH_SIZE_OF_ONE)
LATE_S = 1.0
"""An answer may lie so long until the driver reads it; where a rank changes hands, that counts as its time."""


class Waits(Ledger):
    """Rank 1 takes longer."""

    def train_batch(self, batch: object, batch_info: dict[str, object]) -> dict[str, object]:
        time.sleep(STEP_S * (1 + self.world_rank))
        found: dict[str, object] = super().train_batch(batch, batch_info)
        return found


def asked(trainer: TorchTrainer) -> tuple[TimeLedger, float, float]:
    """The ledger, and from when to when it was asked for: each rank answers at another moment."""
    while True:
        began = time.perf_counter()
        status = trainer.status()
        assert status.ledger is not None
        if all(worker.heartbeat is not None for worker in status.workers):
            return status.ledger, began, time.perf_counter()


def total(ledger: TimeLedger, rank: int) -> float:
    return sum(ledger.of(rank).values())


def test_the_bins_of_every_rank_add_up_across_a_loss(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Waits, num_workers=2, spare_workers=1) as trainer:
        assert "no training call was made yet" in str(trainer.ledger())
        timings = trainer.train(profile=True)["timings"]
        first, first_began, first_ended = asked(trainer)
        while not trainer.status().num_spares:  # a rank that is lost has no successor if none comes within 30 s
            time.sleep(0.05)
        testing.kill_worker(trainer, 1, at="step:9")
        trainer.train()
        trainer.validate()
        second, second_began, second_ended = asked(trainer)
    assert timings["exchange"] > 0
    assert timings["slower_rank"] > 0.25 * NUM_STEPS * STEP_S, "rank 0 waits for rank 1"
    for rank in (0, 1):
        spent = total(second, rank) - total(first, rank)
        assert second_began - first_ended - LATE_S <= spent <= second_ended - first_began + LATE_S
    survivor, successor = second.of(0), second.of(1)
    assert all(survivor[name] > 0 for name in ("again", "recovery_detect", "recovery_form", "recovery_hand_over"))
    # Not `recovery_replace`: with a spare it may be less than answers lie. `test_accounts.py` has it, with a clock.
    assert all(successor[name] > 0 for name in ("recovery_hand_over", "recovery_resume"))
    assert 0 < (second.goodput or 0.0) < 1
    assert second.notes == ()
    assert "shut down" in str(trainer.ledger())
