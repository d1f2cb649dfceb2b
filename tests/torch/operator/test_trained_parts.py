"""Changes of what is trained after `setup`: refused without `rewrap`, and with it carried by snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.core.engine.shared.types import World
from raysgd.core.engine.transfers import DividedValue
from raysgd.core.state.state_codec import StateEncoder, decode
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints.divided import content_of, of_snapshot
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.messages.epochs import EpochRequest
from tests.torch.operators_for_tests import LinearOperator, Operator, equal

Make = Callable[..., TorchTrainer]


class Unfreezes(LinearOperator):
    """Trains its last layer; `add` makes the first one join, `freeze` stops its bias."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def register(self, **parts: Any) -> Any:
        last = parts["models"][2].parameters()
        return super().register(**{**parts, "optimizers": torch.optim.Adam(last, lr=0.05)})


def add(operator: Operator) -> None:
    operator.optimizer.add_param_group({"params": list(operator.model[0].parameters()), "lr": 0.01})


def freeze(operator: Operator) -> None:
    operator.model[2].bias.requires_grad_(False)


def freeze_all(operator: Operator) -> None:
    operator.model.requires_grad_(False)


def replica() -> TorchRunner:
    runner = TorchRunner(TorchSettings(Unfreezes, {}), World(0, 1))
    runner.setup()
    return runner


def train(runner: TorchRunner) -> None:
    runner.train_epoch(EpochRequest(None, {}, False, 0))


def frozen(runner: TorchRunner) -> list[bool]:
    return [not each.requires_grad for each in runner.operator.model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [add, freeze])
def test_training_refuses_a_change_without_a_rewrap(change: Callable[[Any], None]) -> None:
    runner = replica()
    train(runner)
    change(runner.operator)
    with pytest.raises(ValueError, match=r"Call `self.rewrap\(\)` on all workers after such a change"):
        train(runner)
    runner.operator.rewrap()
    train(runner)


def test_a_model_may_be_all_frozen_between_two_calls_and_a_part_where_batches_freeze_parts() -> None:
    runner = replica()
    trained = runner._hosted.internals.trained
    freeze_all(runner.operator)
    trained.check()
    runner.operator.model[0].requires_grad_(True)  # type: ignore[attr-defined]
    trained.check(freezes_in_batches=True)
    assert trained.has_changed()
    add(runner.operator)  # type: ignore[arg-type]
    assert trained.has_changed(freezes_in_batches=True)
    runner.operator.rewrap()
    runner.operator.model.requires_grad_(True)  # type: ignore[attr-defined]
    assert trained.has_changed(freezes_in_batches=True)


def test_a_new_process_trains_what_the_snapshot_says() -> None:
    runner, other = replica(), replica()
    before = decode(StateEncoder().encode(runner.state()), copy=True)
    for change in (add, freeze):
        change(runner.operator)
    runner.operator.rewrap()
    train(runner)
    state = decode(StateEncoder().encode(runner.state()), copy=True)
    other.restore(state, None)
    assert equal(other.state(), state)
    assert frozen(other) == [False, False, False, True]
    train(other)
    train(runner)
    assert equal(other.state(), runner.state())
    for each in (runner, other):  # and back
        each.restore(before, None)
        assert equal(each.state(), before)
        assert frozen(each) == [False] * 4
        train(each)


def test_a_snapshot_that_does_not_fit_freezes_nothing() -> None:
    runner, other = replica(), replica()
    for change in (add, freeze):
        change(runner.operator)
    runner.operator.rewrap()
    train(runner)
    state = decode(StateEncoder().encode(runner.state()), copy=True)
    before = other.state()
    del state["optimizers"][0]["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="`Adam` cannot load this state"):
        other.restore(state, None)
    assert frozen(other) == [False] * 4
    assert equal(other.state(), before)


def test_a_divided_snapshot_fits_a_replica_that_lacks_its_groups() -> None:
    runner, other = replica(), replica()
    add(runner.operator)
    runner.operator.rewrap()
    train(runner)
    state = runner.state()
    parts = DividedValue((StateEncoder().encode(content_of(state, rank=0)),), ((),))
    divided = of_snapshot(parts)
    room = divided.make_room(other._hosted.state.room_for)
    divided.fill(room)
    assert equal(divided.joined(room), state)


def test_files_leave_to_setup_what_is_trained(make_local: Make, tmp_path: Path) -> None:
    trained, other = make_local(Unfreezes), make_local(Unfreezes)

    def change(operator: Operator) -> None:
        freeze(operator)
        operator.rewrap()

    trained.apply_all_operators(change)
    other.load(trained.save(tmp_path / "frozen.pt"))
    assert all(each.requires_grad for each in other.get_local_operator().model.parameters())
    trained.apply_all_operators(add)
    with pytest.raises(ValueError, match="Register an optimizer with the same groups in `setup`"):
        other.load(trained.save(tmp_path / "added.pt"))


def test_a_group_of_what_nothing_saves_cannot_be_given_to_a_new_process() -> None:
    runner = replica()
    runner.operator.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})  # type: ignore[attr-defined]
    runner.operator.rewrap()
    train(runner)
    state = runner.state()
    runner.restore(state, None)
    with pytest.raises(ValueError, match="parameters that are not registered here"):
        replica().restore(state, None)
