"""`excludes_frozen_from_state` on several workers: kills, new workers, and bases that are not the same everywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer
from tests.torch import remade_operators
from tests.torch.operators_for_tests import LinearOperator
from tests.torch.remade_operators import Adapted

pytestmark = pytest.mark.integration

PLACES = ["0 batch", "2 batch", "3 step", "4 step", "1 backward", "4 backward"]


@pytest.fixture(scope="module", autouse=True)
def ships_operators() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(remade_operators)
    yield
    ray.cloudpickle.unregister_pickle_by_value(remade_operators)


class Mortal(Adapted):
    """Ends the process of rank 1 at a place in a batch of the second epoch, once; in double precision."""

    def make_model(self) -> torch.nn.Module:
        model: Any = super().make_model()
        model.norm = torch.nn.Identity()  # it would see the samples of one worker
        return model.double()  # type: ignore[no-any-return]

    def prepare_batch(self, batch: Any) -> Any:
        features, numbers, target = batch
        return super().prepare_batch((features.double(), numbers, target.double()))

    def at(self, place: str) -> None:
        death = Path(self.config["folder"], "death")
        is_there = self.world_rank == 1 and self.global_step == 5 + int(place[0]) and death.exists()
        if is_there and death.read_text() == place:
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.place = max(0, self.global_step - 5)
        if not batch_info.get("warm_up"):
            self.at(f"{self.place} batch")
        return super().train_batch(batch, batch_info)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.at(f"{self.place} backward")
        super().backward(loss, **options)

    def optimizer_step(self, optimizer: Any = None) -> None:
        self.at(f"{self.place} step")
        super().optimizer_step(optimizer)


class MortalByHand(Mortal):
    """The same with steps by hand, whose batches are copied before them."""

    _needs_copies = True


def train(operator_cls: type[LinearOperator], folder: Path, num_workers: int, place: str = "", **config: Any) -> Any:
    if place:
        Path(folder, "death").write_text(place)
    trainer = TorchTrainer(
        training_operator_cls=operator_cls,
        config={"folder": str(folder), "width": 256, **config},
        num_workers=num_workers,
        num_cpus_per_worker=0.5,
        use_gpu=False,
        split_batches=True,
    )
    with trainer:
        losses = [trainer.train()["train_loss"] for _ in range(3)]
        assert not Path(folder, "death").exists(), "the worker died"
        return losses, trainer.get_model(to_cpu=True).state_dict(), trainer.state_dict()


class Drawn(Mortal):
    """Makes another base in each process, unless there is a file `calm`."""

    def make_model(self) -> torch.nn.Module:
        model: Any = super().make_model()
        if not Path(self.config["folder"], "calm").exists():
            model.base[1].weight.data += os.getpid()
        return model  # type: ignore[no-any-return]


class Restarted(Mortal):
    """Begins a call again from the snapshot, in new processes."""

    resumes_epochs = False


@pytest.fixture(scope="module")
def calm(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(Mortal, tmp_path_factory.mktemp("calm"), 2)


@pytest.mark.parametrize("operator_cls", [Mortal, MortalByHand])
@pytest.mark.parametrize(
    "place", [each if each in PLACES[1:3] else pytest.param(each, marks=pytest.mark.soak) for each in PLACES]
)
def test_a_killed_worker_changes_nothing(
    ray_cluster: None, tmp_path: Path, calm: Any, place: str, operator_cls: type[LinearOperator]
) -> None:
    losses, model, state = train(operator_cls, tmp_path, 2, place)
    assert losses[2] == pytest.approx(calm[0][2], rel=1e-9)
    for name, tensor in model.items():
        torch.testing.assert_close(tensor, calm[1][name], rtol=1e-9, atol=1e-9)
    base = {name for name in model if name.startswith("base")}
    assert all(torch.equal(model[name], calm[1][name]) for name in base), "the base was not moved, to the bit"
    assert base.isdisjoint(state["models"][0])


def test_a_call_that_restarts_from_the_snapshot_has_the_base_again(
    ray_cluster: None, tmp_path: Path, calm: Any
) -> None:
    losses, model, _ = train(Restarted, tmp_path, 2, "2 batch")
    assert losses == pytest.approx(calm[0], rel=1e-9)
    assert all(torch.allclose(model[name], each, rtol=1e-9, atol=1e-9) for name, each in calm[1].items())
    assert all(torch.equal(model[name], each) for name, each in calm[1].items() if name.startswith("base"))


def test_workers_that_make_different_bases_are_refused_at_the_start(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`base.1.weight` of model 0 \(`Adapter`\) is not the same on all workers"):
        train(Drawn, tmp_path, 2)


def test_a_new_worker_with_another_base_is_refused(ray_cluster: None, tmp_path: Path) -> None:
    Path(tmp_path, "calm").touch()
    trainer = TorchTrainer(
        training_operator_cls=Drawn,
        config={"folder": str(tmp_path)},
        num_workers=2,
        num_cpus_per_worker=0.5,
        use_gpu=False,
        split_batches=True,
        min_workers=2,
    )
    with trainer:
        trainer.train()
        Path(tmp_path, "calm").unlink()
        Path(tmp_path, "death").write_text("2 batch")
        with pytest.raises(ValueError, match=r"`base.1.weight` of model 0 \(`Adapter`\) .*(same|other values)"):
            trainer.train()


def unfreeze(operator: Any) -> None:
    model = operator._raysgd.registered.original_models[0]
    operator.optimizer.add_param_group({"params": list(model.base[1].requires_grad_(True).parameters())})
    operator.rewrap()


def unfrozen(folder: Path, **options: Any) -> Any:
    config = {"folder": str(folder)}
    with TorchTrainer(training_operator_cls=Mortal, config=config, split_batches=True, **options) as trainer:
        trainer.train()
        trainer.apply_all_operators(unfreeze)
        trainer.train()
        if "num_workers" in options:
            kill_worker(trainer, 1)
        trainer.train()
        state = trainer.state_dict()
        assert {name for name in state["models"][0] if "base" in name} == {"base.1.weight", "base.1.bias"}
        return trainer.get_model(to_cpu=True).state_dict()


def test_what_is_unfrozen_reaches_a_new_worker(ray_cluster: None, tmp_path: Path) -> None:
    options = {"num_workers": 2, "min_workers": 2, "num_cpus_per_worker": 0.5, "use_gpu": False}
    together, alone = unfrozen(tmp_path, **options), unfrozen(tmp_path, use_local=True)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-9, atol=1e-9)
