"""What all ways of keeping replicas equal have in common: the weights of losses, and wrappers taken off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd._text.log_lines import Once
from raysgd.torch.objects.precision import Precision
from raysgd.torch.parallel.ddp import DDP
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.strategy import NoParallel, unwrap
from raysgd.torch.step.gradients import Gradients, OwnSteps
from raysgd.worker.worker_callbacks import InstalledCallbacks
from tests.torch.wrapping import a_model, gradient

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_single_replica_is_left_as_it_is() -> None:
    parallel, model = NoParallel(), a_model()
    parallel.step.weight = 0.5
    assert parallel.wrap(model, None, {}) is model
    parallel.arm([model], may_run_backward=True)
    assert gradient(parallel, model) == [1.0, 1.0]
    with parallel.evaluating([model]):
        pass
    assert not parallel.synchronizes


def test_wrappers_of_pytorch_are_taken_off_and_a_model_that_holds_a_module_is_not() -> None:
    model = a_model()
    holder = torch.nn.Module()
    holder.module = model
    assert unwrap(DDP().wrap(model, None, {})) is model
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(holder) is holder
    assert unwrap(model) is model


def weighed(parallel: NoParallel, model: torch.nn.Module, weight: float, factor: float = 1.0) -> list[float] | None:
    """The gradient of one step on inputs of 1, of a batch with this weight."""
    none: Any = None  # there are no bounds
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own_steps = OwnSteps(Precision(), StepOptions(), none, parallel.step, InstalledCallbacks())
    gradients = Gradients(Precision(), parallel, own_steps, Once())
    parallel.step.begin_batch(parallel.step.weight, 1)
    loss = factor * model(torch.ones(1, 2)).sum()
    gradients.compute(loss, [optimizer], [], weight, model.parameters)
    gradient = unwrap(model).weight.grad  # type: ignore[union-attr]
    return None if gradient is None else gradient.tolist()[0]  # type: ignore[no-any-return, union-attr, operator]


@pytest.mark.parametrize("size", [2, 600])
def test_a_weight_of_the_users_takes_the_place_of_that_of_the_samples(size: int) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model() if size == 2 else torch.nn.Linear(2, 200_000, bias=False), None, {})
    parallel.arm([model], may_run_backward=False)
    parallel.step.weight = 0.25
    assert weighed(parallel, model, 7.0) == [1.0, 1.0]
    assert gradient(parallel, model) == [0.25, 0.25]


@pytest.mark.parametrize("make", [NoParallel, DDP])
def test_a_batch_that_counts_nothing_has_no_gradient_even_where_its_loss_is_nan(make: type[NoParallel]) -> None:
    parallel = make()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], may_run_backward=False)
    assert weighed(parallel, model, 0.0, factor=float("nan")) is None
    assert weighed(parallel, model, 2.0) == [1.0, 1.0], "the next one has"
