"""What all ways of keeping replicas equal have in common: the weights of losses, and wrappers taken off."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from raysgd.torch.parallel.ddp import DDP
from raysgd.torch.parallel.strategy import NoParallel, unwrap
from tests.torch.wrapping import a_model, gradient

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_single_replica_is_left_as_it_is() -> None:
    parallel, model = NoParallel(), a_model()
    parallel.step.weight = 0.5
    assert parallel.wrap(model, None, {}) is model
    parallel.arm([model], weight_in_hook=True)
    assert gradient(parallel, model) == [1.0, 1.0]
    with parallel.evaluating([model]):
        pass
    assert not parallel.synchronizes


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_the_loss_is_weighted_where_only_the_library_computes_gradients(weight: float) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=False)
    parallel.step.weight = weight
    assert gradient(parallel, model) == [weight, weight]


def test_wrappers_of_pytorch_are_taken_off_and_a_model_that_holds_a_module_is_not() -> None:
    model = a_model()
    holder = torch.nn.Module()
    holder.module = model
    assert unwrap(DDP().wrap(model, None, {})) is model
    assert unwrap(torch.nn.DataParallel(model)) is model
    assert unwrap(holder) is holder
    assert unwrap(model) is model


def test_a_step_without_samples_is_padding() -> None:
    step = NoParallel().step
    assert not step.is_padding, "unknown is not none"
    step.begin(0.0, 0, 4)
    assert step.is_padding


def weighed(parallel: NoParallel, model: torch.nn.Module, weight: float, factor: float = 1.0) -> list[float]:
    """The gradient of one step on inputs of 1, of a batch with this weight."""
    model.zero_grad()
    optimizer = object()
    parallel.step.note_backward([optimizer], weight)
    loss = factor * model(torch.ones(1, 2)).sum()
    with parallel.weighting(loss, [optimizer], weight, model.parameters()) as loss:
        loss.backward()
    assert parallel.step.correction(optimizer) == (1.0 if weight else 0.0)
    return unwrap(model).weight.grad.tolist()[0]  # type: ignore[no-any-return, union-attr]


@pytest.mark.parametrize("weight_in_hook", [False, True])
@pytest.mark.parametrize("size", [2, 600])
def test_a_weight_of_the_users_takes_the_place_of_that_of_the_samples(weight_in_hook: bool, size: int) -> None:
    parallel = DDP()
    model = parallel.wrap(a_model() if size == 2 else torch.nn.Linear(2, 200_000, bias=False), None, {})
    parallel.arm([model], weight_in_hook)
    parallel.step.weight = 0.25
    assert weighed(parallel, model, 7.0) == [1.0, 1.0]
    assert gradient(parallel, model) == [0.25, 0.25]


@pytest.mark.parametrize("make", [NoParallel, DDP])
def test_a_batch_that_counts_nothing_has_no_gradient_even_where_its_loss_is_nan(make: type[NoParallel]) -> None:
    parallel = make()
    model = parallel.wrap(a_model(), None, {})
    parallel.arm([model], weight_in_hook=False)
    assert weighed(parallel, model, 0.0, factor=float("nan")) == [0.0, 0.0]
    assert weighed(parallel, model, 2.0) == [1.0, 1.0], "the next one has"


def test_a_model_with_a_process_group_of_its_own_takes_no_weights() -> None:
    parallel = DDP()
    model = parallel.wrap(a_model(), None, {"process_group": dist.new_group([0])})
    parallel.arm([model], weight_in_hook=False)
    with pytest.raises(ValueError, match=r"does not work with `ddp_args=\{\"process_group\": ...\}`: allowed are"):
        weighed(parallel, model, 2.0)
