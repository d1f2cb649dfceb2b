"""A population whose trainers have workers of their own, and what these do while one trial gives way to another."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from raysgd import TorchTrainer
from raysgd.exceptions import WorkerError
from raysgd.trainer.configuration import Recovery
from raysgd.tune.population import Population, train_and_validate
from tests.helpers.doors import controller_of
from tests.torch.operators_for_tests import LinearOperator, equal

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster", "ships_what_tests_define")]


class WideOperator(LinearOperator):
    """Has a state that travels through the object store, and refuses one config."""

    def setup(self, config: dict[str, Any]) -> None:
        if config.get("is_refused"):
            raise KeyError("refused")
        super().setup(config)

    def make_model(self) -> Any:
        import torch

        return torch.nn.Sequential(torch.nn.Linear(3, 100_000), torch.nn.Linear(100_000, 1))


def make(config: dict[str, Any]) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=WideOperator,
        config=config,
        num_workers=2,
        use_gpu=False,
        recovery=Recovery(snapshot_every_s=0),
    )


def make_two(**options: Any) -> Population:
    rates = iter([1e-6, 1e-5])
    return Population(make, {"lr": lambda: next(rates, 1e-4)}, 2, seed=0, quantile=0.5, **options)


class Step:
    """An interval, in which all workers may be held."""

    is_held = False

    def __call__(self, trainer: TorchTrainer) -> dict[str, Any]:
        if self.is_held:
            trainer.apply_all_workers(partial(time.sleep, 600))
        return train_and_validate(trainer)


def weights_on_all(trainer: Any) -> list[Any]:
    weights: list[Any] = trainer.apply_all_operators(lambda operator: operator.model.state_dict())
    return weights


def pids(trainer: Any) -> list[int]:
    found: list[int] = trainer.apply_all_workers(os.getpid)
    return found


def test_an_exploit_copies_the_state_to_all_workers_and_ends_no_process() -> None:
    step = Step()
    with make_two(step=step) as two:
        two.train()
        best, worst = two.ranked
        before = pids(best.trainer) + pids(worst.trainer)
        [exploit] = two.evolve()
        assert pids(best.trainer) + pids(worst.trainer) == before
        first, *others = weights_on_all(best.trainer) + weights_on_all(worst.trainer)
        assert len(others) == 3
        assert all(equal(first, other) for other in others)
        rates = worst.trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
        assert rates == [exploit.config["lr"]] * 2
        assert [result["epoch"] for result in two.train()] == [2, 2]
        assert not equal(*[weights_on_all(member.trainer)[0] for member in two.members])
        check_that_a_copy_needs_no_new_snapshot_and_is_one(two)
        check_that_ctrl_c_ends_the_calls(two, step)


def check_that_a_copy_needs_no_new_snapshot_and_is_one(two: Population) -> None:
    two.train()
    source, taker = two.members
    landed = controller_of(source.trainer).snapshot()  # its pace may have left this call out
    two.copy(taker, source)
    mine = controller_of(taker.trainer).snapshots.landed
    assert mine.shared_state is landed.shared_state
    assert controller_of(taker.trainer).snapshots.is_current


def check_that_ctrl_c_ends_the_calls(two: Population, step: Step) -> None:
    before = [len(member.history) for member in two.members]
    step.is_held = True
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        two.train()
    step.is_held = False
    assert [len(member.history) for member in two.members] == before
    assert [result["epoch"] for result in two.train()] == [4, 4]


@pytest.mark.soak
def test_workers_that_are_lost_are_replaced_in_the_state_and_with_the_config_of_today() -> None:
    with make_two() as two:
        source, taker = two.members
        two.train()
        two.copy(taker, source, {"lr": 3e-6})
        expected = weights_on_all(source.trainer)[0]
        os.kill(pids(taker.trainer)[1], signal.SIGKILL)
        assert equal(weights_on_all(taker.trainer), [expected] * 2)
        assert taker.trainer.apply_all_operators(lambda operator: operator.config["lr"]) == [3e-6] * 2
        two.restart(taker, {"lr": 2e-6, "seed": 3})
        expected = weights_on_all(taker.trainer)[0]
        os.kill(pids(taker.trainer)[0], signal.SIGKILL)
        assert equal(weights_on_all(taker.trainer), [expected] * 2)
        assert taker.trainer.train()["epoch"] == 1


@pytest.mark.soak
def test_a_config_that_the_operator_refuses_is_told_and_another_one_starts_new_workers() -> None:
    with make({"lr": 1e-6}) as trainer:
        before = pids(trainer)
        with pytest.raises(WorkerError, match="refused") as caught:
            trainer.reset_config({"is_refused": True})
        assert isinstance(caught.value, KeyError)
        trainer.reset_config({"lr": 1e-6})
        assert not set(pids(trainer)) & set(before)
        assert trainer.train()["epoch"] == 1
