"""Optimizers that call closures, on several workers as in one process of plain PyTorch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.helpers.doors import controller_of
from tests.torch.lab import Experiment, run_together

pytestmark = pytest.mark.integration

NUM_EPOCHS, BATCH_SIZE = 2, 7


def data() -> TensorDataset:
    """Inputs, targets, and how much each sample counts where the operator goes by that."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(75, 4, generator=generator, dtype=torch.float64)
    targets = inputs.sin().sum(dim=1, keepdim=True) + torch.randn(75, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.randint(5, (75, 1), generator=generator))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    return torch.nn.Sequential(*layers).double()


def make_optimizer(model: torch.nn.Module, search: str | None) -> torch.optim.Optimizer:
    # Small steps: larger ones multiply what rounding leaves.
    return torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=6, line_search_fn=search)


class Fits(TrainingOperator):
    """Takes steps with closures, and counts how often these were called."""

    def setup(self, config: dict[str, Any]) -> None:
        model = make_model()
        self.model, self.optimizer = self.register(models=model, optimizers=make_optimizer(model, config["search"]))
        self.register_data(train_loader=DataLoader(data(), batch_size=BATCH_SIZE))
        self.seen: list[int] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(0)

        def closure() -> Any:
            self.seen[-1] += 1
            return self.loss_of(*batch)

        loss = self.optimizer.step(closure)
        return {"train_loss": float(loss), "num_samples": len(batch[0])}

    def loss_of(self, inputs: Any, targets: Any, counts: Any) -> Any:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        return loss


class FitsWithRung(Fits):
    """Leaves the gradients to the library, and returns a number."""

    def loss_of(self, inputs: Any, targets: Any, counts: Any) -> Any:
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.backward(loss)
        return loss.item()


class FitsByCounts(Fits):
    """Averages over what it counts itself."""

    def loss_of(self, inputs: Any, targets: Any, counts: Any) -> Any:
        squares = (self.model(inputs) - targets) ** 2
        loss = (counts * squares).sum() / counts.sum()
        self.backward(loss, weight=counts.sum())
        return loss


def fitted_alone(search: str | None, joint_batch: int, by_counts: bool) -> tuple[dict[str, Any], list[int]]:
    """The same in plain PyTorch: the weights, and how often each step called the closure."""
    model, calls = make_model(), []
    optimizer = make_optimizer(model, search)
    for inputs, targets, counts in [*DataLoader(data(), batch_size=joint_batch)] * NUM_EPOCHS:
        weights = counts if by_counts else torch.ones_like(counts)
        calls.append(0)

        def closure(part: Any = (inputs, targets, weights)) -> torch.Tensor:
            inputs, targets, weights = part
            calls[-1] += 1
            optimizer.zero_grad()
            loss = (weights * (model(inputs) - targets) ** 2).sum() / weights.sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model.state_dict(), calls


@pytest.mark.parametrize(
    ("operator_cls", "search"), [(Fits, None), *((cls, "strong_wolfe") for cls in (Fits, FitsWithRung, FitsByCounts))]
)
def test_two_workers_fit_as_one_process_does(two: TorchTrainer, operator_cls: type[Fits], search: str | None) -> None:
    found = run_together(two, Experiment(operator_cls, {"search": search}, (("train", None),) * NUM_EPOCHS))
    weights, calls = fitted_alone(search, 2 * BATCH_SIZE, operator_cls is FitsByCounts)
    assert found.seen == [calls] * 2
    torch.testing.assert_close(found.model, [weights] * 2, rtol=1e-6, atol=1e-6)


class Breaks(Fits):
    """On request, rank 1 ends inside a step."""

    def loss_of(self, inputs: Any, targets: Any, counts: Any) -> Any:
        mark = Path(self.config["marks"]) / "break"
        if self.world_rank == 1 and self.seen[-1] == 4 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_of(inputs, targets, counts)


def weights_of(operator: Any) -> dict[str, Any]:
    state: dict[str, Any] = operator._original_models[0].state_dict()
    return state


@pytest.mark.parametrize(("undo", "recovery"), [(False, "rebuilt"), (True, "rejoined")])
def test_three_workers_do_so_too_and_a_loss_inside_a_step_repeats_it_where_it_can_be_undone(
    ray_cluster: None, tmp_path: Path, undo: bool, recovery: str
) -> None:
    expected, _ = fitted_alone("strong_wolfe", 3 * BATCH_SIZE, by_counts=False)
    config = {"search": "strong_wolfe", "marks": str(tmp_path)}
    with TorchTrainer(
        training_operator_cls=Breaks,
        num_workers=3,
        num_cpus_per_worker=0.5,
        config=config,
        recovery_options=Recovery(undo=undo),
    ) as trainer:
        start = trainer.state_dict()
        for is_broken in (False, True):
            trainer.load_state_dict(start)
            trainer.train()
            if is_broken:
                (tmp_path / "break").touch()
            trainer.train()
            torch.testing.assert_close(trainer.apply_all_operators(weights_of), [expected] * 3, rtol=1e-6, atol=1e-6)
        assert [event.kind for event in controller_of(trainer).history.events[1:]] == [recovery]
