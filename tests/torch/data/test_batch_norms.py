"""Batch norms and shares of a joint batch: what is refused, and when."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd.messages.batch_options import BatchOptions
from raysgd.torch.data.batch_norms import leave_out, refusing_single_samples
from raysgd.torch.data.batch_sampler import JointBatchRule
from raysgd.torch.data.batch_streams import DividedLoaderSource, TorchBatchStream
from raysgd.torch.data.sampling import ShardedLoader, shard_loader
from raysgd.torch.parallel.step import BatchStep
from tests.torch.lab import Experiment, run_alone
from tests.torch.operators_for_tests import BatchNormOperator, dataset


class Views(nn.Module):
    """Joins two views of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, features: torch.Tensor) -> Any:
        return self.norm(torch.cat([features, 2 * features]))


def train(model: nn.Module, shape: tuple[int, ...], num_samples: int, taken: list[int]) -> None:
    """Forward passes of rank 0 of two, in joint batches of 16 samples of a shape."""
    loader = DataLoader(torch.rand(num_samples, *shape), 16)  # type: ignore[arg-type]
    sharded = shard_loader(loader, rank=0, world_size=2, training=True, joint=JointBatchRule())
    assert isinstance(sharded, ShardedLoader)
    source, step = DividedLoaderSource(sharded, seed=0), BatchStep()
    with refusing_single_samples([model], source, step):
        for batch in TorchBatchStream(source, step, lambda: 0).take(None):
            model(batch)
            taken.append(len(batch))


WITH_IMAGES = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("model", "shape"), [(nn.BatchNorm1d(4), (4,)), (nn.BatchNorm2d(4), (4, 1, 1)), (WITH_IMAGES, (4, 2, 2))]
)
def test_a_pass_that_ends_with_a_single_sample_is_refused_in_its_first_step(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    taken: list[int] = []
    with pytest.raises(ValueError, match=r"^A batch norm cannot train on a single sample.*`drop_last=True`"):
        train(model, shape, 33, taken)
    assert taken == []
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "shape", "num_samples", "sizes"),
    [
        (nn.BatchNorm1d(4), (4,), 35, [8, 8, 3]),  # the other rank has none of the last three
        (nn.BatchNorm2d(4), (4, 2, 2), 33, [8, 8, 1]),  # an image has many values
        (nn.BatchNorm1d(4), (4, 5), 33, [8, 8, 1]),
        (nn.BatchNorm1d(4).eval(), (4,), 33, [8, 8, 1]),
        (nn.SyncBatchNorm(4).eval(), (4,), 33, [8, 8, 1]),
        (nn.LayerNorm(4), (4,), 33, [8, 8, 1]),
        (Views(), (4,), 33, [8, 8, 1]),
    ],
)
def test_what_can_train_on_all_batches_is_not_refused(
    model: nn.Module, shape: tuple[int, ...], num_samples: int, sizes: list[int]
) -> None:
    taken: list[int] = []
    train(model, shape, num_samples, taken)
    assert taken == sizes


class Counts(BatchNormOperator):
    sizes: ClassVar[list[int]] = []

    def forward(self, features: Any, target: Any) -> Any:
        self.sizes.append(len(target))
        return super().forward(features, target)


class OwnBatches(Counts):
    """May leave out batches of one sample."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize(
    ("operator_cls", "num_steps", "sizes"),
    [(Counts, None, [8]), (Counts, 1, [8, 8]), (OwnBatches, None, [8, 8, 8, 8, 1])],
)
def test_logical_shards_are_refused_with_the_ways_out(
    operator_cls: type[Counts], num_steps: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counts, "sizes", [])
    options = {"batch_options": BatchOptions("constant", deterministic=True, num_shards=2)}
    config = {"num_samples": 33, "batch_size": 16}
    experiment = Experiment(operator_cls, config, [("train", num_steps)], options)
    if num_steps is None:
        with pytest.raises(ValueError, match=r"cannot train on a single sample(.|\\n)*`drop_last=True`"):
            run_alone(experiment)
    else:
        run_alone(experiment)
    assert Counts.sizes == sizes


def test_without_shares_pytorch_says_it() -> None:
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel"):
        run_alone(Experiment(BatchNormOperator, {"num_samples": 5, "batch_size": 4}))


def test_other_batch_norms_than_synchronized_ones_see_padding_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    features = dataset(4).tensors[0]
    end = leave_out([model.eval()])
    assert torch.equal(model(features), nn.Sequential(*model)(features))
    end()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
