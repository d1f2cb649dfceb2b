"""Validation beside the training: the same numbers as inline, whatever happens to those that validate.

By validators, and by spares.

Covers of `raysgd.driver.calls` what is not on the way of `train`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import testing
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import BatchNormOperator

pytestmark = pytest.mark.integration

OPTIONS = {"num_workers": 2, "num_cpus_per_worker": 0.5, "use_gpu": False, "validation_workers": 2}


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


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return tmp_path / "closed"


@pytest.fixture
def trainer(ray_cluster: None, closed: Path) -> Iterator[TorchTrainer]:
    config = {"validation_closed": str(closed), "shift": 0.0}
    with TorchTrainer(training_operator_cls=Validated, config=config, **OPTIONS) as made:
        yield made


def assert_same(beside: Any, inline: Any) -> None:
    """To 1e-7, but for the last batches, which are those of other workers."""
    assert beside.keys() == inline.keys()
    means = {name: value for name, value in inline.items() if not name.startswith("last_")}
    assert {name: beside[name] for name in means} == pytest.approx(means, rel=1e-7, nan_ok=True)


def test_the_weights_are_those_of_the_last_call_whatever_is_trained_and_lost_meanwhile(
    trainer: TorchTrainer, closed: Path
) -> None:
    trainer.train()
    inline = trainer.validate()
    closed.touch()
    handle = trainer.validate(blocking=False)
    num_records = len(trainer.history.records)
    trainer.train()
    trainer.train()
    assert not handle.done()
    assert [record.kind for record in trainer.history.records[num_records:]] == ["train", "train"]
    closed.unlink()
    beside = handle.result(300)
    assert_same(beside, inline)
    assert beside["size"] == 2
    assert trainer.validate() != inline
    first, _, last = trainer.history
    assert (first["val_loss"], last["epoch"]) == (inline["val_loss"], 3)

    # a validator dies: the others and the training notice nothing
    inline = trainer.validate()
    closed.touch()
    handle = trainer.validate(blocking=False)
    group = trainer._validators.controller
    while group.group is None or not group.group.remote_ranks or group.monitor is None:
        time.sleep(0.05)
    time.sleep(0.5)
    group.group.kill_rank(0)
    trainer.train()
    closed.unlink()
    assert_same(handle.result(300), inline)
    assert trainer.num_workers == 2
    assert [event.kind for event in trainer.history.events] == ["started"]

    # a worker that trains dies: the validation notices nothing
    inline = trainer.validate()
    closed.touch()
    handle = trainer.validate(blocking=False)
    testing.kill_worker(trainer, 1, at="step:1")
    trainer.train()
    assert [event.kind for event in trainer.history.events] == ["started", "rejoined"]
    closed.unlink()
    assert_same(handle.result(300), inline)

    # settings that change meanwhile are those of later calls, and validators are told as the others are
    inline = trainer.validate()
    closed.touch()
    handles = [trainer.validate(blocking=False) for _ in range(2)]
    validating = group.group
    trainer.update_config(shift=100.0)
    closed.unlink()
    for handle in handles:
        assert_same(handle.result(300), inline)
    assert_same(trainer.validate(blocking=False).result(300), trainer.validate())
    assert group.group is validating


def test_spares_validate_until_they_are_needed(ray_cluster: None, closed: Path) -> None:
    config = {"validation_closed": str(closed), "shift": 0.0}
    options = {**OPTIONS, "validation_workers": 0, "spare_workers": 1}
    with TorchTrainer(training_operator_cls=Validated, config=config, **options) as trainer:

        def begin() -> tuple[Any, Any]:
            inline = trainer.validate()
            closed.touch()
            return inline, trainer.validate(blocking=False)

        def check(handle: Any, inline: Any) -> None:
            found = [{**each} for each in (handle.result(300), inline)]
            assert [each.pop("size") for each in found] == [1, 2]
            for name in ("spread", "batch_count"):
                [each.pop(name) for each in found]
            assert_same(*found)

        trainer.train()
        inline, handle = begin()
        trainer.train()
        assert not handle.done()
        closed.unlink()
        check(handle, inline)

        # it dies: another one takes its place, and the training notices nothing
        inline, handle = begin()
        [spare] = trainer._controller.group.standby._idle  # type: ignore[union-attr]
        os.kill(spare.info.pid, signal.SIGKILL)
        trainer.train()
        closed.unlink()
        check(handle, inline)
        assert [event.kind for event in trainer.history.events] == ["started"]

        # a worker that trains dies: it leaves its batch and steps in, and the validation is run again
        inline, handle = begin()
        testing.kill_worker(trainer, 1, at="step:1")
        threading.Timer(1.0, closed.unlink).start()
        trainer.train()
        assert [event.kind for event in trainer.history.events] == ["started", "rejoined"]
        assert trainer.num_workers == 2
        assert not handle.done()
        check(handle, inline)
        assert len(set(trainer.apply_all_operators(weights))) == 1

        # it has the settings of the call, also where it was made with others, and steps in with those of now
        inline, handle = begin()
        waiting = trainer.validate(blocking=False)
        trainer.update_config(shift=100.0)
        trainer.reset_config({**config, "shift": 7.0})
        trainer.update_config(shift=8.0)
        closed.unlink()
        check(handle, inline)
        check(waiting, inline)
        inline, handle = begin()
        closed.unlink()
        assert inline["shift"] == 7.0
        check(handle, inline)
        testing.kill_worker(trainer, 1, at="step:1")
        trainer.train()
        assert trainer.apply_all_operators(of_config) == [(7.0, 8.0)] * 2
        assert trainer._used_options() == ["spare_workers", "snapshot_every_n_steps"]


def of_config(operator: Any) -> tuple[float, float]:
    return operator.shift, operator.config["shift"]


def weights(operator: Any) -> float:
    return float(sum(each.double().sum() for each in operator.model.parameters()))
