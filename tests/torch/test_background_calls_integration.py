"""Calls that run while the program goes on: their order, their handles, and what ends them.

Covers `raysgd.trainer.driver.life`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import testing
from raysgd.exceptions import NoDataError, TrainerShutdownError
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator

pytestmark = pytest.mark.integration


class Waiting(LinearOperator):
    """Trains its first step only when a file is gone."""

    def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        while Path(self.config["closed"]).exists():
            time.sleep(0.01)
        if Path(self.config["broken"]).exists():
            raise KeyError("a broken batch")
        return super().train_batch(batch, batch_info)


@pytest.fixture
def closed(tmp_path_factory: pytest.TempPathFactory, trainer: TorchTrainer) -> Iterator[Path]:
    """The file, which is there."""
    path = Path(trainer.config["closed"])
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchTrainer]:
    folder = tmp_path_factory.mktemp("background")
    config = {"closed": str(folder / "closed"), "broken": str(folder / "broken")}
    options = {"num_workers": 2, "num_cpus_per_worker": 0.5, "use_gpu": False}
    with TorchTrainer(training_operator_cls=Waiting, config=config, **options) as made:
        yield made


def kinds(trainer: TorchTrainer, since: int) -> list[tuple[str, int]]:
    return [(record.kind, record.epoch) for record in trainer.history.records[since:]]


def test_the_program_goes_on_and_calls_come_in_their_order(trainer: TorchTrainer, closed: Path) -> None:
    since, epoch = len(trainer.history.records), len(trainer.history)
    first = trainer.train(blocking=False)
    second = trainer.train(num_steps=1, blocking=False)
    third = trainer.validate(blocking=False)
    assert not first.done()
    assert not third.done()
    with pytest.raises(TimeoutError, match="still running"):
        first.result(0.05)
    threading.Timer(0.2, closed.unlink).start()
    assert trainer.train(num_steps=1)["batch_count"] == 1
    assert first.done()
    assert second.done()
    assert third.done()
    assert first.result()["num_samples"] == 20
    assert third.result()["num_samples"] == 13
    expected = [("train", epoch + 1), ("train", epoch + 2), ("validation", epoch + 2), ("train", epoch + 2)]
    assert kinds(trainer, since) == expected


def test_an_exception_is_raised_by_the_handle(trainer: TorchTrainer) -> None:
    broken = Path(trainer.config["broken"])
    broken.touch()
    handle = trainer.train(blocking=False)
    with pytest.raises(KeyError, match="a broken batch"):
        handle.result(90)
    broken.unlink()
    assert trainer.train(num_steps=1)["batch_count"] == 1


def interrupting(handle: Any) -> None:
    """Waits for a call, and presses Ctrl-C meanwhile."""
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.result(90)


def test_a_loss_ctrl_c_and_shutdown_end_what_they_end_in_other_calls(ray_cluster: None, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    config = {"closed": str(closed), "broken": str(tmp_path / "broken")}
    options = {"num_workers": 2, "num_cpus_per_worker": 0.5, "use_gpu": False}
    with TorchTrainer(training_operator_cls=Waiting, config=config, **options) as trainer:
        closed.touch()
        handle = trainer.train(blocking=False)
        testing.kill_worker(trainer, 1)
        closed.unlink()
        assert handle.result(90)["epoch"] == 1
        assert [event.kind for event in trainer.history.events] == ["started", "continued"]

        weights = trainer.state_dict()["models"][0]
        closed.touch()
        running, waiting = trainer.train(blocking=False), trainer.train(blocking=False)
        interrupting(waiting)
        assert not running.done()
        interrupting(running)
        assert running.done()
        assert trainer.history.events[-1].kind == "ended"
        assert all((weights[name] == value).all() for name, value in trainer.state_dict()["models"][0].items())

        running, waiting = trainer.train(blocking=False), trainer.train(blocking=False)
    for handle in (running, waiting):
        with pytest.raises(TrainerShutdownError, match="shut down"):
            handle.result(60)
    with pytest.raises(TrainerShutdownError):
        trainer.train(blocking=False)


Make = Callable[..., TorchTrainer]


class NoValidation(LinearOperator):
    """Registers nothing to validate on."""

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        super().register_data(train_loader=train_loader)


def test_a_validation_without_data_is_refused_at_once(make_local: Make) -> None:
    with pytest.raises(NoDataError, match="nothing to validate on"):
        make_local(NoValidation).validate(blocking=False)


def test_a_validation_by_the_worker_in_the_driver_is_one_inline_and_says_so(
    make_local: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local()
    for _ in range(2):
        assert trainer.validate(blocking=False).result()["num_samples"] == 13
    assert caplog.text.count("because one of them is in the driver") == 1


def test_with_a_worker_in_the_driver_a_call_is_over_at_once(make_local: Make) -> None:
    trainer = make_local()
    handle = trainer.train(blocking=False)
    assert handle.done()
    assert handle.result()["num_samples"] == 20
    with pytest.raises(ValueError, match="blocking"):
        trainer.train(blocking="no")  # type: ignore[call-overload]
