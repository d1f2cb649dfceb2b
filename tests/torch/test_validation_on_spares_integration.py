"""Validation on spares while others train: the same numbers as inline, whatever happens to the spare.

Covers of `raysgd.trainer.driver.calls` what is not on the way of `train`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raysgd import testing
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import BatchNormOperator

pytestmark = pytest.mark.integration

OPTIONS = {"num_cpus_per_worker": 0.5, "use_gpu": False, "spare_workers": 1}


class Validated(BatchNormOperator):
    """Has batch norms and metrics of its own; waits with its validation while there is a file."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.shift = config["shift"]

    def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        while self.config["validation_closed"] and Path(self.config["validation_closed"]).exists():
            time.sleep(0.01)
        self.log("size", float(self.world_size))
        self.log("shift", self.shift)
        self.log("spread", float(batch[0].std()))
        return super().validate_batch(batch, batch_info)


class Begins:
    """Begins validations that stay open until a file is gone, each beside the result of the same one inline."""

    def __init__(self, trainer: TorchTrainer, closed: Path) -> None:
        self.trainer, self.closed = trainer, closed

    def __call__(self) -> tuple[Any, Any]:
        inline = self.trainer.validate()
        self.closed.touch()
        return inline, self.trainer.validate(blocking=False)

    def check(self, handle: Any, inline: Any) -> None:
        """To 1e-7, but for what depends on the batches, which are those of another number of workers."""
        beside = handle.result(300)
        assert beside.keys() == inline.keys()
        assert beside["size"] == 1
        names = [name for name in inline if not name.startswith("last_")]
        means = {name: inline[name] for name in names if name not in ("size", "spread", "batch_count")}
        assert {name: beside[name] for name in means} == pytest.approx(means, rel=1e-7, nan_ok=True)


def test_spares_validate_until_they_are_needed(ray_cluster: None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    config = {"validation_closed": str(closed), "shift": 0.0}
    with TorchTrainer(training_operator_cls=Validated, config=config, num_workers=2, **OPTIONS) as trainer:
        begin = Begins(trainer, closed)
        trainer.train()
        inline, handle = begin()
        num_records = len(trainer.history.records)
        trainer.train()
        trainer.train()
        assert not handle.done()
        assert [record.kind for record in trainer.history.records[num_records:]] == ["train", "train"]
        closed.unlink()
        begin.check(handle, inline)
        first, _, last = trainer.history
        assert (first["val_loss"], last["epoch"]) == (pytest.approx(inline["val_loss"], rel=1e-7), 3)

        # it dies: another one takes its place, and the training notices nothing
        inline, handle = begin()
        [spare] = trainer._life.controller.group.standby._idle  # type: ignore[union-attr]
        os.kill(spare.info.pid, signal.SIGKILL)
        trainer.train()
        closed.unlink()
        begin.check(handle, inline)
        assert [event.kind for event in trainer.history.events] == ["started"]

        # a worker that trains dies: the spare leaves its batch and steps in, and the validation is run again
        inline, handle = begin()
        testing.kill_worker(trainer, 1, at="step:1")
        threading.Timer(1.0, closed.unlink).start()
        trainer.train()
        assert [event.kind for event in trainer.history.events] == ["started", "continued"]
        assert trainer.num_workers == 2
        begin.check(handle, inline)
        assert len(set(trainer.apply_all_operators(weights))) == 1

        # it has the settings of the call, also where it was made with others, and steps in with those of now
        inline, handle = begin()
        waiting = trainer.validate(blocking=False)
        trainer.update_config(shift=100.0)
        trainer.reset_config({**config, "shift": 7.0})
        trainer.update_config(shift=8.0)
        closed.unlink()
        begin.check(handle, inline)
        begin.check(waiting, inline)
        inline, handle = begin()
        closed.unlink()
        assert inline["shift"] == 7.0
        begin.check(handle, inline)
        testing.kill_worker(trainer, 1, at="step:1")
        trainer.train()
        assert trainer.apply_all_operators(of_config) == [(7.0, 8.0)] * 2
        assert trainer._life.used_options() == ["spare_workers", "snapshot_every_n_steps"]


def test_the_spare_of_a_single_worker_validates_and_takes_its_place_from_the_snapshot(
    ray_cluster: None, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    config = {"validation_closed": str(closed), "shift": 0.0}
    with TorchTrainer(training_operator_cls=Validated, config=config, num_workers=1, **OPTIONS) as trainer:
        begin = Begins(trainer, closed)
        trainer.train()
        inline, handle = begin()
        trainer.train()
        assert not handle.done()
        closed.unlink()
        begin.check(handle, inline)  # by now the spare is ready
        inline, handle = begin()
        before = trainer.apply_all_operators(weights)
        [spare] = trainer._life.controller.group.standby._idle  # type: ignore[union-attr]
        testing.kill_worker(trainer, 0)
        threading.Timer(1.0, closed.unlink).start()
        assert trainer.apply_all_operators(weights) == before
        assert trainer.apply_all_workers(os.getpid) == [spare.info.pid]
        assert [event.kind for event in trainer.history.events] == ["started", "restored"]
        begin.check(handle, inline)


def of_config(operator: Any) -> tuple[float, float]:
    return operator.shift, operator.config["shift"]


def weights(operator: Any) -> float:
    return float(sum(each.double().sum() for each in operator.model.parameters()))
