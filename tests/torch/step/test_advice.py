"""Advice for what PyTorch says in words for others, or with a hang: unused parameters, gathers, and batch norms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.arrays.division import Division
from raysgd.torch.data.sampling import PassPlan
from raysgd.torch.step.advice import check_norms, comparing_sizes, with_advice
from raysgd.trainer.configuration import BatchOptions
from tests.torch.lab import Experiment, run_alone
from tests.torch.operators_for_tests import BatchNormOperator


class Branches(torch.nn.Module):
    """A model of which the loss uses one branch."""

    def __init__(self, num_unused: int) -> None:
        super().__init__()
        self.used = torch.nn.Linear(1, 1)
        self.unused = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(num_unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


@pytest.mark.parametrize(
    ("num_unused", "names"),
    [(1, "parameters (`unused.0.weight`) took"), (7, "`unused.3.weight`, `unused.4.weight` and 2 more)")],
)
def test_parameters_without_a_gradient_are_named_with_the_way_out(
    num_unused: int, names: str, process_group: None
) -> None:
    model = DistributedDataParallel(Branches(num_unused))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as caught, with_advice([model]):
        model(torch.ones(1, 1))
    assert names in str(caught.value)
    assert "register(ddp_args={'find_unused_parameters': True})" in str(caught.value)
    assert "PyTorch says: Expected to have finished reduction" in str(caught.value)
    assert dist.get_world_size() == 1


def test_a_name_that_a_wrapper_hides_is_said_with_the_line_to_write(process_group: None) -> None:
    model = DistributedDataParallel(Branches(1))
    with (
        pytest.raises(AttributeError, match=r"`used` belongs to your `Branches`.*write `self\.own\.used`"),
        with_advice([]),
    ):
        model.used(torch.ones(1, 1))
    with pytest.raises(AttributeError, match="no attribute 'other'"), with_advice([]):
        model.other()


DOUBLE = torch.zeros(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "step",
    [
        lambda: nn.Linear(3, 1)(DOUBLE),
        lambda: nn.Conv2d(3, 1, 1)(DOUBLE[..., None, None]),
        lambda: torch.zeros(3, 3) @ DOUBLE.T,
        lambda: nn.functional.binary_cross_entropy(torch.zeros(2, 3), DOUBLE),
    ],
)
def test_float64_that_meets_float32_is_told_how_to_become_float32(step: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Double is float64.* `tensor\.float\(\)`"), with_advice([]):
        step()


def test_what_there_is_no_advice_for_stays_as_it_is() -> None:
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError) as caught, with_advice([]):
        raise error
    assert caught.value is error
    assert str(error) == "something else"


# ------------------------------------------------------------------------------------------------ gathers
# With several ranks they are in `test_global_batch_integration.py`.


def gathered_in_all_ways() -> list[list[float]]:
    """What a rank alone gathers."""
    own, parts, whole = torch.ones(2), [torch.zeros(2)], torch.zeros(2)
    dist.all_gather(parts, own)
    dist.all_gather_into_tensor(whole, own)
    objects: list[float] = [0.0]
    dist.all_gather_object(objects, 1.0)
    return [each.tolist() for each in (*parts, whole, *all_gather(own))] + [objects]


@pytest.mark.parametrize("differ", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_fits_is_gathered_as_ever_and_afterwards_nothing_stands_between(differ: bool, process_group: None) -> None:
    before, asked = dict(vars(dist.ProcessGroup)), []

    def shares_differ() -> bool:
        asked.append(differ)
        return differ

    with comparing_sizes(shares_differ):
        inside = gathered_in_all_ways()
    assert len(asked) >= 4, "every way is looked at"
    assert dict(vars(dist.ProcessGroup)) == before
    assert gathered_in_all_ways() == inside == [[1.0, 1.0]] * 3 + [[1.0]]


# ------------------------------------------------------------------------------------------------ batch norms


def plan(num_samples: int) -> PassPlan:
    """Global batches of 16 on two ranks."""
    return PassPlan(num_samples, 0, Division(16, 2), False, True)


@pytest.mark.parametrize(
    ("model", "num_samples", "words"),
    [
        (nn.BatchNorm1d(4), 33, "cannot train on a single sample.*`drop_last=True`"),
        (nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3)), 33, "a single sample"),
        (nn.SyncBatchNorm(4), 33, "`sync_batchnorm=True` needs a sample on each worker"),
        (nn.SyncBatchNorm(4), 35, "`drop_last=True`"),  # shares of 3 and 0
        (nn.BatchNorm1d(4), 35, None),
        (nn.BatchNorm2d(4), 33, None),  # an image has many values
        (nn.BatchNorm1d(4).eval(), 33, None),
        (nn.SyncBatchNorm(4).eval(), 33, None),
        (nn.SyncBatchNorm(4), 36, None),
        (nn.LayerNorm(4), 33, None),
    ],
)
def test_a_pass_with_a_share_that_a_norm_cannot_train_on_is_refused(
    model: nn.Module, num_samples: int, words: str | None
) -> None:
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_norms([model], plan(num_samples))


class Counts(BatchNormOperator):
    sizes: ClassVar[list[int]] = []

    def forward(self, features: Any, target: Any) -> Any:
        self.sizes.append(len(target))
        return super().forward(features, target)


@pytest.mark.parametrize(("num_steps", "sizes"), [(None, []), (1, [8, 8])])
def test_logical_shards_are_refused_with_the_ways_out(
    num_steps: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counts, "sizes", [])
    options = {"batch_options": BatchOptions(True, deterministic=True, num_shards=2)}
    experiment = Experiment(Counts, {"num_samples": 33, "batch_size": 16}, [("train", num_steps)], options)
    if num_steps is None:
        with pytest.raises(ValueError, match=r"cannot train on a single sample(.|\n)*`drop_last=True`"):
            run_alone(experiment)
    else:
        run_alone(experiment)
    assert Counts.sizes == sizes


def test_without_shares_pytorch_says_it() -> None:
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel"):
        run_alone(Experiment(BatchNormOperator, {"num_samples": 5, "batch_size": 4}))
