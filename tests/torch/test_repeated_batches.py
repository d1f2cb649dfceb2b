"""A batch that breaks at any of its exchanges is repeated, and the training ends where an undisturbed one does.

Each program runs in this process as a rank whose group breaks at a chosen exchange. Where the library says that the
batch cannot be repeated, the driver restarts the call from the snapshot, in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.engine.shared.types import StateHandover, World
from raysgd.messages.epochs import EpochRequest
from raysgd.torch import TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.torch_runner import TorchRunner

WORLD = World(rank=0, size=2, local_size=2)
NUM_STEPS, BATCH_SIZE = 6, 3


class Broken:
    """Breaks the group at one of the exchanges of a run, counted from 0, and counts them."""

    def __init__(self, runner: TorchRunner, at: int | None) -> None:
        self.num_seen, self._at = 0, at
        exchanges = runner.operator._raysgd.parallel.exchanges
        real = exchanges.track

        def track(future: Any, is_last: bool) -> Any:
            self.exchange()
            return real(future, is_last)

        exchanges.track = track  # type: ignore[method-assign]
        runner.operator.exchange_by_hand = self.exchange  # type: ignore[attr-defined]

    def exchange(self) -> None:
        number, self.num_seen = self.num_seen, self.num_seen + 1
        if number == self._at:
            raise dist.DistNetworkError("the group is gone")


class Counting(nn.Module):
    """Changes a buffer in each forward pass: assigns another one, and writes past what PyTorch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        self.count.data = self.count.data + 1
        return features + 0.01 * self.mean


class Momentum(nn.Module):
    """A second network follows the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (nn.Linear(2, 1, dtype=torch.float64) for _ in range(2))
        self.target.requires_grad_(False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.2)
        return self.online(features) + 0.3 * self.target(features)


class Stock(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = self.make_model()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.05, weight_decay=0.01)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        )
        self._register_data()

    def _register_data(self) -> None:
        features = torch.randn(2 * NUM_STEPS * BATCH_SIZE, 2, dtype=torch.float64)
        self.register_data(train_loader=DataLoader(TensorDataset(features, features.sum(1, True)), BATCH_SIZE))

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Counting(), nn.Linear(2, 1)).double()

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def compute(self, batch: Any) -> None:
        self.criterion(self.model(batch[0]), batch[1]).backward()

    def exchange_by_hand(self) -> None: ...


class MomentumEncoder(Stock):
    def make_model(self) -> nn.Module:
        return Momentum()


class OwnBatch(Stock):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.compute(batch)
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            for weight in self.weights:
                weight.clamp_(-1.0, 1.0)
        return {}


class ReducedByHand(OwnBatch):
    """Reduces a metric of its own behind the step."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        super().train_batch(batch, batch_info)
        self.exchange_by_hand()
        dist.all_reduce(torch.ones(1))
        return {}


class Climbs(OwnBatch):
    """Sharpness-aware; a subclass says how it goes up and down."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.compute(batch)
        back = self.climb([0.1 * weight.grad for weight in self.weights if weight.grad is not None])
        self.optimizer.zero_grad()
        self.compute(batch)
        back()
        self.optimizer.step()
        return {}

    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        with torch.no_grad():
            torch._foreach_add_(self.weights, uphill)
        return lambda: torch._foreach_sub_([each.data for each in self.weights], uphill)


class ClimbsInData(Climbs):
    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        for weight, by in zip(self.weights, uphill, strict=True):
            weight.data.add_(by)
        return lambda: [weight.data.sub_(by) for weight, by in zip(self.weights, uphill, strict=True)]


class ClimbsBySwapping(Climbs):
    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        before = [weight.data for weight in self.weights]
        for weight, by in zip(self.weights, uphill, strict=True):
            weight.data = weight.data + by
        return lambda: [setattr(weight, "data", data) for weight, data in zip(self.weights, before, strict=True)]


class ClimbsAsVector(Climbs):
    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        before = nn.utils.parameters_to_vector(self.weights).detach()
        up = before + nn.utils.parameters_to_vector(uphill)
        nn.utils.vector_to_parameters(up, self.weights)
        return lambda: nn.utils.vector_to_parameters(before, self.weights)


class ClimbsInNumPy(Climbs):
    def climb(self, uphill: list[torch.Tensor]) -> Callable[[], object]:
        arrays = [weight.detach().numpy() for weight in self.weights]
        before = [array.copy() for array in arrays]
        for array, by in zip(arrays, uphill, strict=True):
            array += by.numpy()
        return lambda: [array.__setitem__(..., old) for array, old in zip(arrays, before, strict=True)]


class ClimbsLater(ClimbsInData):
    """Does so in every third batch, from the second one on."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        chosen = ClimbsInData if self.global_step % 3 == 1 else OwnBatch
        return chosen.train_batch(self, batch, batch_info)


class Accumulates(OwnBatch):
    """Adds the gradients of two batches up by hand."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.compute(batch)
        if self.global_step % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {}


class Pair(Stock):
    """Two networks; the second one steps in every second batch, with the gradients of two."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Linear(2, 2)).double() for _ in range(2)]
        (self.judge, self.maker), (self.of_judge, self.of_maker) = self.register(
            models=nets, optimizers=[torch.optim.Adam(each.parameters(), lr=0.05) for each in nets]
        )
        self.model = self.judge
        self._register_data()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        made = self.maker(batch[0])
        self.of_judge.zero_grad()
        (self.judge(made.detach()).mean() - self.judge(batch[0]).square().mean()).backward()
        self.of_judge.step()
        (-self.judge(made).mean()).backward()
        if self.global_step % 2:
            self.of_maker.step()
            self.of_maker.zero_grad()
        return {}


PROGRAMS: dict[type[Stock], Callable[[int], bool]] = {  # whether the batch of an exchange can be repeated
    Stock: lambda number: True,
    MomentumEncoder: lambda number: number > 0,
    OwnBatch: lambda number: True,
    ReducedByHand: lambda number: True,
    Climbs: lambda number: True,
    ClimbsInData: lambda number: True,
    ClimbsBySwapping: lambda number: True,
    ClimbsAsVector: lambda number: True,
    ClimbsInNumPy: lambda number: True,
    ClimbsLater: lambda number: number != 2,
    Accumulates: lambda number: True,
    Pair: lambda number: True,
}


def runner_of(program: type[Stock]) -> TorchRunner:
    runner = TorchRunner(TorchSettings(program, {}, scheduler_step_freq="manual"), WORLD)
    runner.setup()
    return runner


def request() -> EpochRequest:
    return EpochRequest(NUM_STEPS, {}, False, seed=0)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def trained_by(runner: TorchRunner) -> Any:
    state = runner.state()
    return plain({name: state[name] for name in ("models", "optimizers")}), runner.operator.global_step


def undisturbed(program: type[Stock]) -> tuple[Any, int]:
    """The outcome of a call, and the number of its exchanges."""
    runner = runner_of(program)
    seen = Broken(runner, None)
    torch.manual_seed(1)
    runner.train_epoch(request(), None)
    return trained_by(runner), seen.num_seen


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_batch_that_broke_at_any_of_its_exchanges_leaves_nothing_behind(
    process_group: None, program: type[Stock]
) -> None:
    expected, num_exchanges = undisturbed(program)
    for number in range(num_exchanges):
        runner = runner_of(program)
        Broken(runner, number)
        torch.manual_seed(1)
        with pytest.raises(dist.DistNetworkError):
            runner.train_epoch(request(), None)
        progress = runner.replica_progress()
        assert progress.obstacle is None
        assert progress.is_whole == PROGRAMS[program](number), number
        if progress.is_whole:
            runner.regroup(WORLD, StateHandover())
            runner.resume_epoch(request())
            assert trained_by(runner) == expected, number


def test_a_rank_that_takes_over_goes_on_with_gradients_that_wait(process_group: None) -> None:
    expected, _ = undisturbed(Accumulates)
    source, taker = runner_of(Accumulates), runner_of(Accumulates)
    Broken(source, 3)
    with pytest.raises(dist.DistNetworkError):
        source.train_epoch(request(), None)
    source.regroup(WORLD, StateHandover())
    taker.regroup(WORLD, StateHandover())
    taker._take_over(*source._handed_over())
    taker.resume_epoch(request())
    assert trained_by(taker) == expected
