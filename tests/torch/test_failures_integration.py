"""What happens when user code raises in a worker, and when a worker is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch

from raysgd.core.engine.placement import Reservation
from raysgd.exceptions import WorkerError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.trainer.configuration import Recovery
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.helpers.patience import hearing_all_ranks
from tests.helpers.processes import is_alive
from tests.torch.operators_for_tests import (
    DropoutOperator,
    LinearOperator,
    ScheduledOperator,
    equal,
    samples_seen,
)

# Far below the half hour for which a collective would wait: whoever hangs there, fails here.
pytestmark = pytest.mark.integration


class Mishap(ScheduledOperator, DropoutOperator):
    """Raises, hangs or is killed where `info["mishap"]` says so; a mishap comes once only."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"shuffle": True, "optimizer": "adam", **config})
        self.num_epochs_noted = 0

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.meet("train_batch", batch_info)
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.meet("validate_batch", batch_info)
        return super().validate_batch(batch, batch_info)

    def meet(self, where: str, info: dict[str, Any]) -> None:
        mishap = info.get("mishap")
        if mishap is None or (where, self.world_rank, info["batch_idx"]) != mishap["at"]:
            return
        if not Path(mishap["once"]).exists():
            Path(mishap["once"]).touch()
            mishap["what"]()

    def state_dict(self) -> Any:
        return {"noted": self.num_epochs_noted}

    def load_state_dict(self, state_dict: Any) -> None:
        self.num_epochs_noted = state_dict["noted"]


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide_by_zero() -> None:
    raise ZeroDivisionError("on purpose")


def lose_the_database() -> None:
    raise RuntimeError("database: connection refused")


@pytest.fixture
def mishap(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Make an `info` with a mishap in it."""

    def make(what: Callable[[], None], rank: int, batch_idx: int = 1, where: str = "train_batch") -> dict[str, Any]:
        once = tmp_path / f"{time.monotonic_ns()}"
        return {"mishap": {"at": (where, rank, batch_idx), "what": what, "once": str(once)}}

    return make


def trainer_of_two(**options: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=Mishap, num_workers=2, scheduler_step_freq="batch", **options)


def kill_rank(trainer: TorchTrainer, rank: int) -> None:
    """Kills the process of one rank between two calls, and waits until it is gone."""
    pid = trainer.worker_group.infos[rank].pid
    os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.01)


def note(operator: Any) -> None:
    operator.num_epochs_noted += 1


# ------------------------------------------------------------------------------------------------ losses


def test_a_training_with_losses_equals_one_without(
    ray_cluster: None, mishap: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """In the middle of a pass, in a validation, between two calls: to the last bit, whichever rank it was."""
    with trainer_of_two() as trainer:
        expected = [trainer.train(), trainer.train()]
        trainer.apply_all_operators(note)
        expected.append(trainer.validate())
        expected += [trainer.train(num_steps=2), trainer.train(), trainer.train()]
        state = trainer.state_dict()
    with trainer_of_two(recovery=Recovery(in_place=False)) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        results = [trainer.train(), trainer.train(info=mishap(be_killed, rank=1))]
        assert trainer._num_failures == 1
        assert not {*pids} & {*trainer.apply_all_workers(os.getpid)}, "all workers are new"
        trainer.apply_all_operators(note)
        results.append(trainer.validate(info=mishap(be_killed, rank=0, where="validate_batch")))
        assert trainer._num_failures == 2
        results.append(trainer.train(num_steps=2))
        kill_rank(trainer, 0)
        path = trainer.save(tmp_path / "last.pt")
        trainer.load(path)
        assert trainer._num_failures == 3
        results += [trainer.train(), trainer.train()]
        assert equal(results, expected)
        assert equal(trainer.state_dict(), state)
        assert trainer.num_workers == 2
        assert trainer._last_resize > 0


@ray.remote(num_cpus=2)
class Competitor:
    """Takes the place of a worker as soon as there is one."""

    def ready(self) -> None: ...


class TakesBatchSizeOfGroup(Mishap):
    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=self.config[BATCH_SIZE], shuffle=shuffle)


def test_a_group_shrinks_when_somebody_took_the_room_and_grows_when_there_is_some(
    ray_cluster: None, mishap: Callable[..., dict[str, Any]]
) -> None:
    with TorchTrainer(
        training_operator_cls=TakesBatchSizeOfGroup,
        num_workers=2,
        num_cpus_per_worker=2,
        recovery=Recovery(in_place=False),
        scheduler_step_freq="batch",
        config={BATCH_SIZE: 7, "num_samples": 22},
    ) as trainer:
        assert trainer.train()["batch_count"] == 4  # of 6 samples, 3 for each worker
        competitor = Competitor.remote()
        with patch.object(Reservation, "close", gives_way_to(competitor)):
            result = trainer.train(info=mishap(be_killed, rank=1))
        assert (trainer.num_workers, trainer._num_failures) == (1, 1)
        assert (result["epoch"], result["num_samples"], result["batch_count"]) == (2, 22, 4)
        assert trainer.config[BATCH_SIZE] == 7, "what was asked for is not rounded twice"
        assert trainer.apply_all_operators(lambda operator: operator.config[BATCH_SIZE]) == [7]
        assert trainer.train(num_steps=1)["num_samples"] == 7
        num_before = num_granted()
        ray.kill(competitor)
        while num_granted() == num_before:  # the trainer asked for it, and gets it as soon as it is free
            time.sleep(0.05)
        result = trainer.train()
        assert trainer.num_workers == 2
        assert (result["epoch"], result["num_samples"]) == (3, 15), "it went on inside the pass"
        assert trainer._num_failures == 1, "growing is no failure"
        assert trainer.config[BATCH_SIZE] == 6


def gives_way_to(competitor: Any) -> Callable[..., None]:
    """Gives a reservation back, and waits until the competitor has taken what it wants of it."""
    close = Reservation.close

    def give_back(reservation: Reservation, timeout_s: float) -> None:
        close(reservation, timeout_s)
        ray.get(competitor.ready.remote())

    return give_back


def num_granted() -> int:
    return sum(group["state"] == "CREATED" for group in ray.util.placement_group_table().values())


# ------------------------------------------------------------------------------------------------ exceptions


def assert_tells_whose_fault_it_was(error: BaseException, line: str, ranks: str) -> None:
    assert isinstance(error, WorkerError)
    text = str(error).splitlines()
    assert text[0] == "ZeroDivisionError: on purpose"
    assert __file__ in text[1]
    assert line in text[1]
    assert text[2].startswith(f"  on {ranks}, node ")
    assert str(error).count("on purpose\n  raised at") == 1


@pytest.mark.promise("Errors are raised once, with rank, node and line")
def test_an_exception_on_one_rank_is_raised_once_and_soon(
    ray_cluster: None, mishap: Callable[..., dict[str, Any]]
) -> None:
    with trainer_of_two() as trainer:
        trainer.train()
        before = trainer.state_dict()
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.train(info=mishap(divide_by_zero, rank=1))  # the other rank waits for this one in vain
        assert_tells_whose_fault_it_was(caught.value, 'raise ZeroDivisionError("on purpose")', "rank 1")
        assert trainer._num_failures == 0, "user code is not tried again"
        assert equal(trainer.state_dict(), before)
        assert trainer.train()["epoch"] == 2

        def fail(operator: TrainingOperator) -> None:
            raise ZeroDivisionError("on purpose")

        pids = trainer.apply_all_workers(os.getpid)
        with hearing_all_ranks(), pytest.raises(ZeroDivisionError) as caught:
            trainer.apply_all_operators(fail)
        assert_tells_whose_fault_it_was(caught.value, 'raise ZeroDivisionError("on purpose")', "ranks 0, 1")
        assert trainer.apply_all_workers(os.getpid) == pids, "all have answered, so all are kept"

        def stop(operator: TrainingOperator) -> None:
            breakpoint()

        with hearing_all_ranks(), pytest.raises(BdbQuit, match=r"`use_local=True`"):
            trainer.apply_all_operators(stop)
        with hearing_all_ranks(), pytest.raises(ZeroDivisionError):
            trainer.validate(info=mishap(divide_by_zero, rank=0, where="validate_batch"))
        with hearing_all_ranks(), pytest.raises(RuntimeError, match="database: connection refused") as refused:
            trainer.validate(info=mishap(lose_the_database, rank=1, where="validate_batch"))
        assert isinstance(refused.value, WorkerError), "only PyTorch's own words tell of a lost connection"
        assert trainer._num_failures == 0
        assert trainer.apply_all_workers(os.getpid) == pids
        assert trainer.validate()["num_samples"] == 13
        assert trainer.train()["epoch"] == 3


class FailsInLastStep(LinearOperator):
    """Raises in the last batch of a pass, on the ranks that `info` names, before its optimizer begins or after that."""

    def optimizer_step(self) -> None:
        self.meet("before")
        super().optimizer_step()
        self.meet("after")

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.told = batch_info
        return super().train_batch(batch, batch_info)

    def meet(self, where: str) -> None:
        is_meant = self.world_rank in self.told.get("ranks", ()) and self.told["batch_idx"] == 4
        if is_meant and where == self.told["where"]:
            raise ZeroDivisionError("on purpose")


def weights(operator: LinearOperator) -> list[float]:
    return [float(each) for parameter in operator.model.parameters() for each in parameter.flatten()]


def test_replicas_that_an_exception_left_different_are_not_gone_on_with(ray_cluster: None) -> None:
    """Rank 0 had completed the last step, rank 1 not: both have answered, and neither waits for the other."""
    with TorchTrainer(training_operator_cls=FailsInLastStep, num_workers=2, config={"batch_size": 2}) as trainer:
        trainer.train()
        before, pids = trainer.apply_all_operators(weights), trainer.apply_all_workers(os.getpid)
        with hearing_all_ranks(), pytest.raises(ZeroDivisionError) as caught:
            trainer.train(info={"ranks": [0, 1], "where": "before"})
        assert "were ended" not in str(caught.value), "all failed alike"
        assert trainer.apply_all_workers(os.getpid) == pids
        kept = trainer.apply_all_operators(weights)
        assert kept[0] == kept[1] != before[0], "in the middle of the call"
        assert trainer.train()["num_samples"] == 4, "the step that raised"
        kept = trainer.apply_all_operators(weights)
        ended = r"workers were ended.*from the last completed call"
        with hearing_all_ranks(), pytest.raises(ZeroDivisionError, match=ended) as caught:
            trainer.train(info={"ranks": [1], "where": "before"})
        assert_tells_whose_fault_it_was(caught.value, 'raise ZeroDivisionError("on purpose")', "rank 1")
        assert trainer.apply_all_operators(weights) == kept, "the last call that was completed left it so"
        assert not {*pids} & {*trainer.apply_all_workers(os.getpid)}
        assert trainer.train()["num_samples"] == 20, "the whole pass"
        trained = trainer.apply_all_operators(weights)
        assert trained[0] == trained[1]


def test_a_remote_worker_goes_on_with_the_batch_that_raised(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=FailsInLastStep) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.train(info={"ranks": [0], "where": "before"})
        trainer.apply_all_operators(samples_seen)
        assert trainer.train()["epoch"] == 1
        assert trainer.apply_all_operators(samples_seen) == [[[16, 17, 18, 19]]]


class FailsInSetup(LinearOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.world_rank == 1:
            raise ZeroDivisionError("on purpose")
        torch.distributed.barrier()


def test_an_exception_in_setup_on_one_rank_is_raised_as_it_is(ray_cluster: None) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        TorchTrainer(training_operator_cls=FailsInSetup, num_workers=2)
    assert_tells_whose_fault_it_was(caught.value, 'raise ZeroDivisionError("on purpose")', "rank 1")


def test_a_trainer_whose_workers_are_dead_is_shut_down_all_the_same(ray_cluster: None) -> None:
    trainer = trainer_of_two()
    for pid in trainer.apply_all_workers(os.getpid):
        os.kill(pid, signal.SIGKILL)
    trainer.shutdown()
    trainer.shutdown()
    with pytest.raises(RuntimeError, match="This trainer was shut down"):
        trainer.train()


class OnDevice:
    """A metric that only the process's training thread gets at once, as on a GPU that waits for another rank."""

    ndim = 0

    def __init__(self, value: float, patience_s: float) -> None:
        self.value, self.patience_s, self.thread = value, patience_s, threading.get_ident()

    def item(self) -> float:
        if threading.get_ident() != self.thread:
            time.sleep(self.patience_s)
        return self.value

    def __float__(self) -> float:
        return self.item()


class Waiting(LinearOperator):
    """Trains for long, with such metrics."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        found = super().train_batch(batch, batch_info)
        time.sleep(self.config["step_s"])
        return {**found, "waits": OnDevice(1.0, self.config["wait_s"])}


def test_a_progress_bar_that_waits_for_the_device_makes_no_worker_silent(ray_cluster: None) -> None:
    config = {BATCH_SIZE: 8, "step_s": 1.5, "wait_s": 6.0}
    with TorchTrainer(
        training_operator_cls=Waiting,
        num_workers=2,
        config=config,
        use_tqdm=True,
        recovery=Recovery(heartbeat_s=2.0),
    ) as trainer:
        trainer.train(num_steps=4)
        assert [event.kind for event in controller_of(trainer).history.events] == ["started"]
