"""Programs that step several times in a batch rejoin after a loss in the middle of one.

Covers `raysgd.torch.parallel.undo` in a group of several processes. More programs are in `tests.torch.idioms`; here are
those whose loop is not the stock one. Their numbers do not depend on how a global batch is divided.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.parallel import sync, undo
from tests.helpers.doors import controller_of

pytestmark = pytest.mark.integration

NUM_STEPS, JOINT_BATCH, NUM_FEATURES = 10, 12, 3
BETWEEN, IN_EXCHANGE, WAITING = "between", "exchange", "waiting"
INTO_EXCHANGE_S = 0.0005


def line() -> torch.nn.Module:
    return torch.nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)


class Mortal(TrainingOperator):
    """Ends its process at a place in a batch, once: a file names the step of the pass, the place, and the rank."""

    def at(self, place: str) -> None:
        """Say where the batch is."""
        death = Path(self.config["folder"], f"{self.global_step % NUM_STEPS} {place} {self.world_rank}")
        if not self.global_step or not death.exists():  # a standby worker takes a step in advance
            return
        death.unlink()
        if place != IN_EXCHANGE:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(INTO_EXCHANGE_S, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(NUM_STEPS * JOINT_BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=JOINT_BATCH, shuffle=True)


class OwnLoop(Mortal):
    """Has a loop of its own, and steps its optimizer twice in a batch, and the scheduler behind."""

    resumes_epochs = True
    num_loops = 0

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(line(), torch.nn.Tanh(), torch.nn.Linear(1, 1, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        )
        self.register_data(train_loader=self.loader())

    def train_epoch(self, iterator: Iterable[Any], info: Any = None, num_steps: Any = None) -> dict[str, Any]:
        self.num_loops += 1
        for features, target in iterator:
            for is_second in (False, True):
                if is_second:
                    self.at(BETWEEN)
                    self.at(IN_EXCHANGE)
                self.optimizer.zero_grad()
                self.criterion(self.model(features), target).backward()
                self.optimizer.step()
            self.global_step += 1
            self.scheduler.step()
        return {"num_loops": self.num_loops}


class Module(lightning.pytorch.LightningModule):
    """Has two optimizers, which it steps by hand."""

    operator: Any

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = line(), line()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.first, self.second)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            output = torch.tanh(self.first(batch[0])) + self.second(batch[0])
            loss = torch.nn.functional.mse_loss(output, batch[1])
            if number:
                self.operator.at(BETWEEN)
                self.operator.at(IN_EXCHANGE)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss


class LightningByHand(TrainingOperator.from_ptl(Module), Mortal):  # type: ignore[misc]
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        object.__setattr__(self._module, "operator", self)  # not as a part of the module

    def _loader(self, given: Any, hook: str) -> Any:
        return self.loader() if hook == "train_dataloader" else None


class QueuesSums(Mortal):
    """Knows only after a wait whether its sums are complete, as with NCCL. It may die in the wait."""

    def setup(self, config: dict[str, Any]) -> None:
        def wait() -> None:
            self.at(WAITING)
            torch.distributed.barrier()

        undo.wait_for_collectives, sync.reachable = wait, lambda: torch.device("cpu")  # what is reached waits
        super().setup(config)


class OwnLoopThatQueues(QueuesSums, OwnLoop):
    pass


class StockLoopThatQueues(QueuesSums, OwnLoop):
    train_epoch = TrainingOperator.train_epoch


def train_with_losses(
    operator_cls: type[Mortal], deaths: list[str], recovery: str, folder: Path, undo: bool | None = None, **options: Any
) -> Any:
    """Return what the first worker returned, after a check that all is as without the losses."""
    with TorchTrainer(
        training_operator_cls=operator_cls,
        num_workers=3,
        num_cpus_per_worker=0.5,
        config={"folder": str(folder)},
        split_batches=True,
        scheduler_step_freq="manual",
        recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0, undo=undo),
        **options,
    ) as trainer:
        before = trainer.state_dict()
        trainer.train()
        undisturbed = trainer.state_dict()["models"]
        trainer.load_state_dict(before)
        for death in deaths:
            (folder / death).touch()
        first, *_ = trainer.train(reduce_results=False)
        assert not list(folder.iterdir())
        losses = [event.kind for event in controller_of(trainer).history.events if event.is_failure]
        assert losses == [recovery] * len(deaths)
        data = trainer.status().data
        assert data is not None
        assert data.used == data.due
        torch.testing.assert_close(trainer.state_dict()["models"], undisturbed, rtol=1e-6, atol=1e-9)
    return first


@pytest.mark.parametrize(
    ("operator_cls", "undo", "recovery"),
    [(OwnLoop, True, "continued"), (LightningByHand, True, "continued"), (OwnLoop, False, "restored")],
)
def test_a_batch_that_broke_off_half_way_is_undone_and_repeated_or_the_call_is(
    ray_cluster: None, tmp_path: Path, operator_cls: type[Mortal], undo: bool, recovery: str
) -> None:
    """A loop of user code is called again with the batches that are left."""
    deaths = [f"2 {BETWEEN} 2", f"6 {IN_EXCHANGE} 0"] if undo else [f"2 {BETWEEN} 2"]
    first = train_with_losses(operator_cls, deaths, recovery, tmp_path, undo)
    if operator_cls is OwnLoop:
        assert first["num_loops"] == (4 if undo else 1)


@pytest.mark.parametrize(("operator_cls", "precision"), [(OwnLoopThatQueues, "fp32"), (StockLoopThatQueues, "fp16")])
def test_no_step_is_taken_with_sums_that_are_not_complete(
    ray_cluster: None, tmp_path: Path, operator_cls: type[Mortal], precision: str
) -> None:
    """In fp16, a step changes the state of the scaler, too."""
    deaths = [f"2 {WAITING} 2", f"6 {WAITING} 0"]
    train_with_losses(operator_cls, deaths, "continued", tmp_path, precision=precision)
