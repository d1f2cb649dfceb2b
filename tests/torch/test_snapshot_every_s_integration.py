"""Snapshots that are not taken after each call, with real workers."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import Recovery
from raysgd.trainer.worker.replica_state import StateCopies
from tests.helpers.doors import controller_of
from tests.torch.operators_for_tests import LinearOperator, equal

pytestmark = pytest.mark.integration


class Heavy(LinearOperator):
    """Its state is too large to travel with an answer."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.ballast = torch.zeros(2**18)

    def state_dict(self) -> Any:
        return {"ballast": self.ballast}

    def load_state_dict(self, state_dict: Any) -> None:
        self.ballast = state_dict["ballast"]


def load_up(operator: Heavy) -> None:
    operator.ballast = operator.ballast + 1


def load_up_in_place(operator: Heavy) -> None:
    operator.ballast += 1


def send_nothing_while(flag: Path) -> None:
    """In this worker, lets no copy be made for the driver while there is this file."""
    fetch = StateCopies.fetch

    def held(self: StateCopies, token: int) -> Any:
        until = time.monotonic() + 60
        while flag.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return fetch(self, token)

    StateCopies.fetch = held  # type: ignore[method-assign]


def ballast(state: Any) -> float:
    [value] = state["operator"]["ballast"].unique().tolist()
    return float(value)


@pytest.mark.usefixtures("ray_cluster")
def test_what_no_snapshot_covers_is_run_again_and_a_file_is_written_from_the_copy(tmp_path: Path) -> None:
    with TorchTrainer(
        training_operator_cls=Heavy,
        num_workers=2,
        min_workers=2,
        recovery=Recovery(in_place=False, snapshot_every_s=3600),
        use_gpu=False,
    ) as trainer:
        start = trainer.state_dict()
        for _ in range(3):
            trainer.train()
        expected = trainer.state_dict()
        trainer.load_state_dict(start)
        for _ in range(2):
            trainer.train()
        os.kill(trainer.status().workers[1].pid, signal.SIGKILL)
        assert trainer.train()["epoch"] == 3
        assert trainer.status().failures == ("from the last snapshot, with 2 completed calls since run again",)
        assert "every 3600 s" in trainer.status().snapshot_pace
        assert equal(trainer.state_dict()["models"], expected["models"])
        trainer.apply_all_operators(load_up)
        trainer.save(tmp_path / "last.pt", blocking=False)
        trainer.apply_all_operators(load_up)
    saved = torch.load(tmp_path / "last.pt", weights_only=False)
    assert saved["epoch"] == 3
    assert bool((saved["operator"]["ballast"] == 1).all())
    assert controller_of(trainer).snapshots.last_file == str(tmp_path / "last.pt")


@pytest.mark.usefixtures("ray_cluster")
def test_a_state_is_copied_before_it_changes_and_until_then_survivors_or_the_last_snapshot_have_it(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "held"
    with TorchTrainer(training_operator_cls=Heavy, num_workers=2, use_gpu=False) as trainer:
        for number, lost in enumerate([(), (1,), (0,), (0, 1)], start=1):
            trainer.apply_all_workers(partial(send_nothing_while, flag))
            trainer.apply_all_operators(load_up_in_place)
            trainer.state_dict()  # so that no snapshot is on its way
            flag.touch()
            trainer.apply_all_operators(load_up_in_place)
            status = trainer.status()
            assert status.snapshot is not None
            assert status.snapshot.has_newer
            trainer.save(tmp_path / f"{number}.pt", blocking=False)
            for rank in lost:
                os.kill(status.workers[rank].pid, signal.SIGKILL)
            if lost:
                trainer.train()
            else:
                trainer.apply_all_operators(load_up_in_place)
            flag.unlink()
            assert ballast(trainer.state_dict()) == 2 * number + 1, f"after the loss of {lost}"
        status = trainer.status()
        assert (status.num_continued, status.num_restored) == (2, 1), "survivors go on with what they have"
        trainer.save(tmp_path / "last.pt")  # makes up for the files of states that were lost with rank 0
    saved = {path.stem: ballast(torch.load(path, weights_only=False)) for path in tmp_path.glob("*.pt")}
    assert saved == {"1": 2, "2": 5, "last": 9}
