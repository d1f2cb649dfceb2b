"""What is hard to lose a worker over: long steps, frozen processes, loaders with processes, several optimizers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray.cloudpickle
from torch.utils.data import DataLoader

from raysgd import testing
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import Recovery
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.helpers.hygiene import RaySurroundings
from tests.torch import ledger
from tests.torch.gate import Gate
from tests.torch.ledger import Ledger, parameters_of, uses
from tests.torch.operators_for_tests import BatchNormOperator, ScheduledOperator, equal
from tests.torch.programs import run_program

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def ships_the_ledger() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(ledger)
    yield
    ray.cloudpickle.unregister_pickle_by_value(ledger)


def kinds(trainer: TorchTrainer) -> list[str]:
    """What happened since it was started."""
    return [event.kind for event in controller_of(trainer).history.events[1:]]


def train_until_whole(trainer: TorchTrainer) -> int:
    """Trains for an epoch, and for more where a new worker is late, as on a busy machine; returns how many it took."""
    num_epochs = 0
    while num_epochs == 0 or trainer.num_workers < 2:
        trainer.train()
        num_epochs += 1
    return num_epochs


def assert_alike(trainer: TorchTrainer) -> None:
    first, *others = trainer.apply_all_operators(parameters_of)
    assert all(equal(other, first) for other in others)


# ------------------------------------------------------------------------------------------------ silence


@pytest.mark.soak
def test_a_long_step_is_none_of_a_frozen_process_which_is_lost(ray_cluster: None) -> None:
    """With processes that load: they stay with their worker, or end with it."""
    config = {"num_samples": 48, "num_loader_processes": 2}
    with TorchTrainer(
        training_operator_cls=Ledger, num_workers=2, config=config, recovery=Recovery(heartbeat_s=4.0)
    ) as trainer:
        with testing.slow_rank(trainer, 0, 12.0):
            trainer.train(num_steps=1)
        assert kinds(trainer) == []
        testing.hang_rank(trainer, 0, at="step:3")
        trainer.train()
        assert kinds(trainer) == ["hung", "continued"]
        assert uses(trainer) == {1}
        with testing.slow_rank(trainer, 1, 1.5):  # it has the first rank by then
            testing.kill_worker(trainer, 0, at="step:1")
            trainer.train(num_steps=3)
        assert kinds(trainer) == ["hung", "continued", "continued"]
        trainer.train()
        assert uses(trainer) == {2}
        assert_alike(trainer)


# ------------------------------------------------------------------------------------------------ what is kept


class Rich(ScheduledOperator, BatchNormOperator):
    """Adam, BatchNorm, a scheduler, and the batch size of the group; knows the objects that it was given."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"optimizer": "adam", "shuffle": True, **config})
        self.first_model, self.first_optimizer = id(self.model), id(self.optimizer)

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return DataLoader(data, batch_size=self.config[BATCH_SIZE], shuffle=shuffle)


def seen_by(operator: Rich) -> dict[str, Any]:
    return {
        "is the same": (id(operator.model), id(operator.optimizer)) == (operator.first_model, operator.first_optimizer),
        "batch size": operator.config[BATCH_SIZE],
        "pid": os.getpid(),
        # Without the buffers: each rank keeps those of its own last batch until the next one begins.
        "parameters": [parameter.detach().clone() for parameter in operator.model.parameters()],
        "state": (operator.optimizer.state_dict(), operator.scheduler.state_dict()),
    }


def test_a_survivor_keeps_its_objects_and_the_batch_follows_the_group(ray_cluster: None, newcomers: Gate) -> None:
    with TorchTrainer(
        training_operator_cls=Rich,
        num_workers=2,
        config={BATCH_SIZE: 8, "num_samples": 48},
        scheduler_step_freq="batch",
        recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0),
        initialization_hook=newcomers,
    ) as trainer:
        assert trainer.train()["batch_count"] == 6
        before = trainer.apply_all_operators(seen_by)
        newcomers.close()
        testing.kill_worker(trainer, 0, at="step:2")
        assert trainer.train()["batch_count"] == 6, "half as many workers, each with twice as large batches"
        assert trainer.num_workers == 1
        survivor = trainer.worker_group.beside(0, lambda runner: seen_by(runner.operator)).result(60)
        assert survivor["pid"] == before[1]["pid"]
        assert (survivor["is the same"], survivor["batch size"]) == (True, 8)
        assert survivor["state"][1]["last_epoch"] == 12, "the scheduler took each step of the two passes once"
        newcomers.open()
        trainer.train()
        after = trainer.apply_all_operators(seen_by)
        assert [(seen["is the same"], seen["batch size"]) for seen in after] == [(True, 4)] * 2
        assert equal(after[0]["state"], after[1]["state"])
        assert equal(after[0]["parameters"], after[1]["parameters"])
        assert survivor["pid"] in [seen["pid"] for seen in after]
        assert kinds(trainer) == ["continued", "grown"]


# ------------------------------------------------------------------------------------------------ driver and worker


def test_a_driver_that_is_a_worker_goes_on_when_the_other_one_is_lost(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Ledger, num_workers=2, use_local=True) as trainer:
        with pytest.raises(ValueError, match=r"rank 0 is this process.*Use one of \[1\]"):
            testing.kill_worker(trainer, [0, 1])
        with pytest.raises(ValueError, match="rank 0 is this process"):
            testing.hang_rank(trainer, 0, at="step:1")
        operator = trainer.get_local_operator()
        model = operator.model  # type: ignore[attr-defined]
        testing.kill_worker(trainer, 1, at="step:7")
        num_epochs = train_until_whole(trainer)
        testing.kill_worker(trainer, 1)
        num_epochs += train_until_whole(trainer)
        testing.kill_worker(trainer, 1, at="validate")
        assert trainer.validate()["num_samples"] == 60
        assert [kind for kind in kinds(trainer) if kind != "grown"] == ["continued"] * 3
        assert trainer.get_local_operator() is operator
        assert operator.model is model  # type: ignore[attr-defined]
        assert uses(trainer) == {num_epochs}
        assert_alike(trainer)


# ------------------------------------------------------------------------------------------------ endings


WHILE_REPLACED = "an interrupt while workers are replaced"
ENDINGS = {
    "two interrupts": """
        for after_s in (0.5, 0.55):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            trainer.train(num_steps=1000)
        except KeyboardInterrupt:
            print("INTERRUPTED")
        time.sleep(0.5)
    """,
    WHILE_REPLACED: """
        threading.Timer(0.5, testing.kill_worker, (trainer, [0, 1])).start()
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            trainer.train(num_steps=1000)
        except KeyboardInterrupt:
            print("INTERRUPTED")
    """,
    "an exception in the driver": """
        testing.kill_worker(trainer, 0)
        raise ZeroDivisionError("on purpose")
    """,
}


@pytest.mark.parametrize(
    "ending",
    ["two interrupts", *(pytest.param(name, marks=pytest.mark.soak) for name in ENDINGS if name != "two interrupts")],
)
def test_a_program_that_is_ended_amid_losses_leaves_nothing(ending: str, ray_cluster: None) -> None:
    before = RaySurroundings.now()
    ended = run_program(
        """
        import os, signal, threading, time
        from raysgd import testing
        from raysgd.torch import TorchTrainer
        from tests.torch import ledger
        from tests.torch.ledger import Ledger

        ray.cloudpickle.register_pickle_by_value(ledger)
        trainer = TorchTrainer(training_operator_cls=Ledger, num_workers=2, config={"step_s": 0.1})
        """
        + ENDINGS[ending]
    )
    assert before.leaks() == [], ended.stderr
    if ending == "an exception in the driver":
        assert ended.returncode == 1
        assert "ZeroDivisionError: on purpose" in ended.stderr
    else:
        assert "INTERRUPTED" in ended.stdout or "KeyboardInterrupt" in ended.stderr, ended.stderr
