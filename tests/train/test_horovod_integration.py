"""Functions for Horovod on real workers. How they live through losses is in `test_frameworks_integration`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.horovod import HorovodConfig

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(HorovodConfig(), num_workers=2, logdir=tmp_path_factory.mktemp("shared"))
    trainer.start()
    yield trainer
    trainer.shutdown()


def sum_of_ranks() -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()  # harmless where it is done already
    return float(hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum))


def test_horovod_is_there_with_the_ranks_of_the_trainer(shared: Trainer) -> None:
    def function() -> Any:
        import horovod.torch as hvd

        assert hvd.is_initialized()
        assert (hvd.local_rank(), hvd.local_size()) == (train.local_rank(), train.world_size())
        return hvd.rank() == train.world_rank(), sum_of_ranks()

    assert shared.run(function) == [(True, 3.0)] * 2


def test_a_function_may_start_and_end_horovod_itself(shared: Trainer) -> None:
    def function() -> float:
        import horovod.torch as hvd

        total = sum_of_ranks()
        hvd.shutdown()
        return total

    assert [shared.run(function) for _ in range(2)] == [[3.0, 3.0]] * 2
