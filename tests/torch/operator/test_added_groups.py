"""Parameter groups that an optimizer was given after `setup`: in files, in snapshots, and back to those of before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd._state.state_codec import StateEncoder
from raysgd.engine.shared.types import World
from raysgd.engine.transfers import DividedValue
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints.divided_snapshot import DividedSnapshot, content_of
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.torch_runner import TorchRunner
from tests.torch.operators_for_tests import LinearOperator, Operator, equal

Make = Callable[..., TorchTrainer]


class Unfreezes(LinearOperator):
    """Trains its last layer; `add` makes the first one join."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def register(self, **parts: Any) -> Any:
        last = parts["models"][2].parameters()
        return super().register(**{**parts, "optimizers": torch.optim.Adam(last, lr=0.05)})


def add(operator: Operator) -> None:
    operator.optimizer.add_param_group({"params": list(operator.model[0].parameters()), "lr": 0.01})


@pytest.fixture
def trained(make_local: Make) -> TorchTrainer:
    trainer = make_local(Unfreezes)
    trainer.train()
    trainer.apply_all_operators(add)
    trainer.train()
    return trainer


def test_a_new_trainer_goes_on_with_them_from_a_file(trained: TorchTrainer, make_local: Make, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "last.pt")
    other = make_local(Unfreezes)
    other.load(path)
    assert other.train() == trained.train()
    assert equal(other.state_dict(), trained.state_dict())
    [state] = torch.load(path)["optimizers"]
    assert state["added_groups"] == [["0.0.weight", "0.0.bias"]]
    partial = make_local(Unfreezes)
    partial.load(path, parts=("optimizers",))
    assert len(partial.get_local_operator().optimizer.param_groups) == 2


def test_a_state_of_before_takes_them_back(trained: TorchTrainer, make_local: Make) -> None:
    before = make_local(Unfreezes)
    before.train()
    trained.load_state_dict(before.state_dict())
    assert equal(trained.state_dict(), before.state_dict())
    trained.apply_all_operators(add)
    assert trained.train()["epoch"] == 2


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([["0.3.weight", "0.0.bias"]], r"parameters that are not registered here \(0.3.weight\)"),
        (7, "not lists of names"),
        ([[["0.0.weight"]]], r"not registered here \(\['0.0.weight'\]\)"),
        ([["0.0.weight", "0.0.weight"]], "a parameter twice"),
        ([["0.2.weight"]], "more than one parameter group"),
    ],
)
def test_those_of_something_else_are_refused_and_change_nothing(
    groups: Any, words: str, trained: TorchTrainer, make_local: Make
) -> None:
    state = copy.deepcopy(trained.state_dict())
    state["optimizers"][0]["added_groups"] = groups
    other = make_local(Unfreezes)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    assert equal(other.state_dict(), before)


def test_parameters_that_nothing_saves_stay_where_they_are(trained: TorchTrainer, make_local: Make) -> None:
    def add_stranger(operator: Operator) -> None:
        operator.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

    trained.apply_all_operators(add_stranger)
    state = copy.deepcopy(trained.state_dict())
    trained.train()
    trained.load_state_dict(state)
    assert equal(trained.state_dict(), state)
    with pytest.raises(ValueError, match=r"that are not registered here \(no name\)"):
        make_local(Unfreezes).load_state_dict(state)


def test_a_divided_snapshot_fits_a_replica_that_lacks_them(trained: TorchTrainer) -> None:
    state = trained.state_dict()
    parts = DividedValue((StateEncoder().encode(content_of(state, rank=0)),), ((),))
    runner = TorchRunner(TorchSettings(Unfreezes, {}), World(0, 1))
    runner.setup()
    assert equal(DividedSnapshot(parts).taken(runner._hosted.state.room_for), state)
