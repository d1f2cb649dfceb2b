"""Following the cluster inside an epoch: growing back, snapshots on the way, nodes that go away, frozen workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.util.metrics import Gauge

from raysgd import testing
from raysgd.core.connections import torch as torch_connection
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.core.history.status import TrainerStatus
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import Recovery
from tests.torch.gate import Gate, mark_when_inside
from tests.torch.ledger import Ledger, parameters_of, uses

pytestmark = pytest.mark.integration


class DiesOnceASnapshotHasLanded(Ledger):
    """The process of each rank ends once, in step 25, as soon as the driver has a snapshot."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        marks = Path(self.config["marks"])
        note = marks / f"note of rank {self.world_rank}"
        if batch_info["global_step"] == 25 and not note.exists():
            note.touch()
            while not (marks / "landed").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)


class GoesOn(Ledger):
    """Catches whatever a batch raises. Rank 1 cuts its connections once, if the config says where to note that."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        note = Path(self.config.get("note_of_cut", "."))
        if self.world_rank == 1 and batch_info["global_step"] == 7 and not note.exists():
            note.touch()
            assert torch_connection._joined is not None
            torch_connection._joined.interrupt()
        try:
            return super().train_batch(batch, batch_info)
        except Exception:
            return {}


class GoesOnByHand(GoesOn):
    """Averages gradients itself."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size


def wait_for_others_no_longer_than_five_seconds(operator: Ledger) -> None:
    """As with `timeout_s=5`, but in this group only: on a busy machine the next one may take longer to begin."""
    joined: Any = torch_connection._joined
    joined._mesh.timeout_s = 5.0


@pytest.fixture
def trainers() -> Iterator[list[TorchTrainer]]:
    made: list[TorchTrainer] = []
    yield made
    for trainer in made:
        trainer.shutdown(force=True)


def kinds(trainer: TorchTrainer) -> list[str]:
    return [event.kind for event in trainer.status().events if event.kind != "started"]


@pytest.mark.promise("A lost worker costs a step, or at most a call")
def test_four_workers_with_a_constant_global_batch_lose_one_and_go_on_at_once(
    ray_cluster: None, trainers: list[TorchTrainer]
) -> None:
    config = {"num_samples": 960, "batch_size": 12, "step_s": 0.3, "slow_size": 3}
    options: dict[str, Any] = {"num_workers": 4, "num_cpus_per_worker": 0.25, "split_batches": True}
    trainer = TorchTrainer(training_operator_cls=Ledger, config=config, **options)
    trainers.append(trainer)
    testing.kill_worker(trainer, 1, at="step:3")
    trainer.train()
    status = trainer.status()
    assert [(event.kind, event.new_size) for event in status.events[1:]] == [("continued", 3), ("grown", 4)]
    assert uses(trainer) == {1}
    assert status.data is not None
    assert (status.data.due, status.data.used) == (960, 960)
    assert status.global_batch == ""


def test_a_trainer_that_was_restarted_with_one_worker_keeps_it_when_it_grows(
    ray_cluster: None, trainers: list[TorchTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=2, split_batches=False)
    trainers.append(trainer)
    testing.kill_worker(trainer, 1, at="setup")
    testing.kill_worker(trainer, [0, 1], at="step:3")
    trainer.train()
    assert kinds(trainer) == ["restored"]
    [left] = [worker.pid for worker in trainer.status().workers if worker.pid]
    while trainer.num_workers < 2:
        trainer.train()
    assert kinds(trainer) == ["restored", "grown"]
    assert trainer.apply_all_workers(os.getpid)[0] == left
    assert len(uses(trainer)) == 1
    assert "whole batches" not in caplog.text, "they were chosen"


def test_one_of_two_workers_waits_for_a_new_one_and_whole_batches_are_told_once(
    ray_cluster: None, trainers: list[TorchTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=2)
    trainers.append(trainer)
    assert "whole batches" not in caplog.text
    testing.kill_worker(trainer, 1, at="step:3")
    trainer.train()
    status = trainer.status()
    assert [(event.kind, event.new_size) for event in status.events[1:]] == [("continued", 2)]
    assert uses(trainer) == {1}
    assert status.global_batch == "2 workers x 3 samples: a global batch of 6"
    trainer.train(num_steps=1)
    line = "each of 2 workers takes whole batches of 3, 6 in all; `split_batches=True` divides them"
    assert caplog.text.count(line) == 1
    assert not trainer.split_batches


class NeedsThree(Ledger):
    """On fewer than three workers, its batches need more memory than there is."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.world_size < 3:
            torch.empty(2**56, dtype=torch.uint8)
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("use_local", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_survivors_that_find_no_memory_for_their_shares_wait_for_a_new_worker(
    use_local: bool, ray_cluster: None, trainers: list[TorchTrainer]
) -> None:
    options: dict[str, Any] = {"num_workers": 3, "num_cpus_per_worker": 0.25, "split_batches": True}
    trainer = TorchTrainer(training_operator_cls=NeedsThree, use_local=use_local, **options)
    trainers.append(trainer)
    testing.kill_worker(trainer, 1, at="step:3")
    trainer.train()
    first, *others = [(event.kind, event.new_size) for event in trainer.status().events[1:]]
    assert (first, others[-1][1]) == (("continued", 2), 3)
    assert "DefaultCPUAllocator" in trainer.status().events[2].cause
    assert uses(trainer) == {1}


@pytest.mark.promise("A lost worker costs a step, or at most a call")
@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_restart_goes_on_from_the_last_snapshot_inside_the_epoch(
    in_place: bool, ray_cluster: None, trainers: list[TorchTrainer], tmp_path: Path
) -> None:
    trainer = TorchTrainer(
        training_operator_cls=DiesOnceASnapshotHasLanded,
        num_workers=2,
        config={"marks": str(tmp_path)},
        recovery=Recovery(in_place=in_place, snapshot_every_n_steps=2),
    )
    trainers.append(trainer)
    watcher = threading.Thread(target=mark_when_inside, args=(trainer, tmp_path / "landed"))
    watcher.start()
    result = trainer.train()
    watcher.join()
    [rebuilt] = [event for event in trainer.status().events if event.kind == "restored"]
    assert rebuilt.detail.startswith("from a snapshot inside the call, after ")
    assert uses(trainer) == {1}
    assert (result["num_samples"], result["batch_count"]) == (240, 40), "the metrics are those of the whole call"


@pytest.mark.promise("A frozen worker is replaced")
def test_a_worker_that_froze_between_two_calls_is_replaced(
    ray_cluster: None, trainers: list[TorchTrainer], newcomers: Gate
) -> None:
    options: dict[str, Any] = {
        "recovery": Recovery(heartbeat_s=2.0, wait_for_workers=False, resize_interval_s=600.0),
        "initialization_hook": newcomers,
    }
    trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=3, **options)
    trainers.append(trainer)
    newcomers.close()
    testing.kill_worker(trainer, 2, at="step:3")
    trainer.train()
    assert trainer.num_workers < 3, "so that the next call looks whether it can grow"
    newcomers.open()
    testing.hang_rank(trainer, trainer.num_workers - 1)
    trainer.train()
    assert "hung" in kinds(trainer)
    assert uses(trainer) == {2}


def test_a_rank_that_the_others_waited_for_too_long_is_told_of_and_replaced(
    ray_cluster: None, trainers: list[TorchTrainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raysgd.core.engine.group._STUCK_S", 1.0)
    monkeypatch.setattr("raysgd.core.engine.monitor._REPORT_S", 60.0)
    trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=2, recovery=Recovery(settle_timeout_s=3.0))
    trainers.append(trainer)
    trainer.train(num_steps=2)
    trainer.apply_all_operators(wait_for_others_no_longer_than_five_seconds)
    with testing.slow_rank(trainer, 1, 60.0):
        trainer.train()
    assert kinds(trainer) == ["continued"]
    assert uses(trainer) == {1}
    assert "workers are not stopping" in caplog.text
    assert "rank 0: epoch 1, step 0, broken off" in caplog.text
    stack_of_rank_1 = caplog.text.partition("rank 1: epoch 1, step 0, training\n")[2]
    assert "in train_epoch" in stack_of_rank_1
    assert "in spring" in stack_of_rank_1


@pytest.mark.parametrize(
    ("operator_cls", "parallel", "dies", "is_large", "recovery"),
    [
        pytest.param(GoesOn, "ddp", True, True, "continued", marks=pytest.mark.soak),
        (GoesOn, "ddp", False, False, "continued"),
        pytest.param(GoesOnByHand, "none", False, False, "restored", marks=pytest.mark.soak),
    ],
)
def test_no_sample_is_lost_where_user_code_catches_what_a_lost_connection_raises(
    operator_cls: type[Ledger],
    parallel: str,
    dies: bool,
    is_large: bool,
    recovery: str,
    ray_cluster: None,
    trainers: list[TorchTrainer],
    tmp_path: Path,
) -> None:
    config = {"is_large": is_large, **({} if dies else {"note_of_cut": str(tmp_path / "cut")})}
    trainer = TorchTrainer(training_operator_cls=operator_cls, num_workers=2, config=config, strategy=parallel)
    trainers.append(trainer)
    if dies:
        testing.kill_worker(trainer, 1, at="step:7")
    trainer.train()
    assert kinds(trainer) == [recovery]
    assert uses(trainer) == {1}
    data = trainer.status().data
    assert data is not None
    assert (data.due, data.used) == (240, 240)


class BeginsFrozen(Ledger):
    """Its line is frozen by `setup`, and in no group of the optimizer."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.net.line.requires_grad_(False)
        del self.optimizer.param_groups[0]


def thaw(operator: Ledger) -> None:
    operator.net.line.requires_grad_(True)
    operator.optimizer.add_param_group({"params": list(operator.net.line.parameters()), "lr": 0.03})
    operator.rewrap()


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_new_worker_trains_what_was_unfrozen_before_it_came(
    in_place: bool, ray_cluster: None, trainers: list[TorchTrainer]
) -> None:
    trainer = TorchTrainer(training_operator_cls=BeginsFrozen, num_workers=2, recovery=Recovery(in_place=in_place))
    trainers.append(trainer)
    trainer.train(num_steps=2)
    trainer.apply_all_operators(thaw)
    [frozen, _] = trainer.apply_all_operators(parameters_of)
    testing.kill_worker(trainer, 1, at="step:3")
    trainer.train()
    assert kinds(trainer) == ["continued" if in_place else "restored"]
    first, second = trainer.apply_all_operators(parameters_of)
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, first, frozen))
    assert uses(trainer) == {1}


def test_while_a_call_runs_its_own_numbers_are_told_here_and_to_the_metrics_of_ray(
    ray_cluster: None, trainers: list[TorchTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"num_samples": 120, "step_s": 0.03}
    trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=2, config=config)
    trainers.append(trainer)
    seen: list[TrainerStatus] = []
    reported: list[tuple[str, float]] = []  # while the call ran
    is_over = threading.Event()
    set_gauge = Gauge.set

    def note(self: Gauge, value: float, tags: dict[str, str]) -> None:
        set_gauge(self, value, tags)
        if not is_over.is_set():
            reported.append((self.info["name"], value))

    monkeypatch.setattr(Gauge, "set", note)

    def look() -> None:
        while not is_over.wait(0.2):
            seen.append(trainer.status())

    watcher = threading.Thread(target=look)
    watcher.start()
    with testing.slow_rank(trainer, 1, 0.3):
        trainer.train()
    is_over.set()
    watcher.join()
    used = [status.data.used for status in seen if status.data is not None and status.data.pass_index == 0]
    assert used == sorted(used)
    assert any(0 < number < 120 for number in used)
    inside = [status for status in seen if status.samples_per_s is not None]
    assert inside, "before the first call is over"
    assert inside[-1].straggler == 1
    assert trainer.status().data == SamplesUsed(0, due=120, used=120)

    assert [name for name, _ in reported].count("raysgd_samples_used") >= 2, "about once a second"
    last = dict(reported)
    assert (last["raysgd_workers"], last["raysgd_straggler"], last["raysgd_samples_due"]) == (2, 1, 120)
