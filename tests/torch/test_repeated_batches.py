"""A batch that breaks at any of its exchanges is repeated, and the training ends where an undisturbed one does.

Each idiom runs in this process as a rank whose group breaks at a chosen exchange. Where the library says that the
batch cannot be repeated, the driver restarts the call from the snapshot, in other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel import sync as gradient_sync
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.messages.epochs import EpochRequest
from tests.torch import idioms
from tests.torch.idioms import NUM_FEATURES, Batch, Idiom
from tests.torch.operators_for_tests import equal

WORLD = World(rank=0, size=2, local_size=2)
REQUEST = EpochRequest(6, {}, False, seed=0)


class SamLater(idioms.SamData):
    """Goes up in every third batch, from the second one on."""

    def step_on(self, batch: Batch) -> None:
        chosen = idioms.SamData if self.global_step % 3 == 1 else idioms.Own
        chosen.step_on(self, batch)


class GanDrops(idioms.GanAccumulates):
    """Draws random numbers."""

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Dropout(0.1))


PROGRAMS: dict[type[Idiom], Callable[[int], bool]] = {  # whether the batch of an exchange can be repeated
    **dict.fromkeys([Idiom, idioms.Own, idioms.Metric, idioms.Scheduled, idioms.WganClips], lambda number: True),
    **dict.fromkeys([idioms.Sam, idioms.SamData, idioms.SamSwaps, idioms.SamVector], lambda number: True),
    **dict.fromkeys([idioms.SamNumPy, idioms.Accumulating, GanDrops, idioms.LocalCodes], lambda number: True),
    idioms.Momentum: lambda number: number > 0,
    SamLater: lambda number: number != 2,
}


class Group:
    """Breaks at one of the exchanges of a run, counted from 0, and counts them."""

    def __init__(self, runner: TorchRunner, breaks_at: int | None = None) -> None:
        self.runner, self.breaks_at, self.num_seen = runner, breaks_at, 0

    def train(self) -> None:
        of_user_code = SimpleNamespace(**{**vars(dist), "all_reduce": self.counted(dist.all_reduce)})
        with (
            patch.object(gradient_sync, "_tracked", self.counted(gradient_sync._tracked)),
            patch.object(idioms, "dist", of_user_code),
        ):
            torch.manual_seed(1)
            self.runner.train_epoch(REQUEST, None)

    def counted(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            number, self.num_seen = self.num_seen, self.num_seen + 1
            if number == self.breaks_at:
                raise dist.DistNetworkError("the group is gone")
            return exchange(*args)

        return count


@pytest.fixture
def make(process_group: None, tmp_path: Path) -> Callable[[type[Idiom]], TorchRunner]:
    def make(program: type[Idiom]) -> TorchRunner:
        config = {"idiom": program.__name__, "folder": str(tmp_path), "dtype": "float64"}
        runner = TorchRunner(TorchSettings(Idiom, config, scheduler_step_freq="manual"), WORLD)
        torch.manual_seed(0)
        with patch.dict(idioms.IDIOMS, {program.__name__: program}):
            runner.setup()
        return runner

    return make


Make = Callable[[type[Idiom]], TorchRunner]


def trained_by(runner: TorchRunner) -> Any:
    state = runner.state()
    return state["models"], state["optimizers"], runner.operator.global_step


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_batch_that_broke_at_any_of_its_exchanges_leaves_nothing_behind(make: Make, program: type[Idiom]) -> None:
    undisturbed = Group(make(program))
    undisturbed.train()
    expected = trained_by(undisturbed.runner)
    assert undisturbed.num_seen >= 6
    for number in range(undisturbed.num_seen):
        runner = make(program)
        with pytest.raises(dist.DistNetworkError):
            Group(runner, number).train()
        progress = runner.replica_progress()
        assert progress.obstacle is None
        assert progress.can_be_source == PROGRAMS[program](number), number
        if progress.can_be_source:
            runner.regroup(WORLD, StateHandover())
            runner.resume_epoch(REQUEST)
            assert equal(trained_by(runner), expected), number


def test_a_rank_that_takes_over_goes_on_with_gradients_that_wait(make: Make) -> None:
    undisturbed, source, taker = (make(idioms.Accumulating) for _ in range(3))
    Group(undisturbed).train()
    with pytest.raises(dist.DistNetworkError):
        Group(source, 3).train()
    source.regroup(WORLD, StateHandover())
    taker.regroup(WORLD, StateHandover())
    call = source._training
    assert call is not None
    taker._take_over(source._hosted.state.read(), call.state(with_metrics=False))
    taker.resume_epoch(REQUEST)
    assert equal(trained_by(taker), trained_by(undisturbed))
