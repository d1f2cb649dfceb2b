"""What closures of optimizers may return, and where they have no place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.closures import Closures


def closures(own_weight: float = 0.5, others: tuple[float, float] = (1.5 * 8.0, 1.5)) -> tuple[Closures, NoParallel]:
    """Those of a rank whose batch has this weight, beside one with a loss of 8 and three quarters of the samples."""
    parallel = NoParallel()
    parallel.step.is_joint, parallel.step.weight = True, own_weight
    return Closures(parallel, lambda *own: [mine + theirs for mine, theirs in zip(own, others, strict=True)]), parallel


@pytest.mark.parametrize("loss", [4.0, 4, np.float32(4), torch.tensor(4.0), torch.tensor([[4.0]])])
def test_a_loss_is_the_mean_over_the_samples_of_all_ranks(loss: Any) -> None:
    found = closures()[0].call(lambda: loss)
    assert float(found) == 7.0
    assert isinstance(found, torch.Tensor) == isinstance(loss, torch.Tensor)
    assert float(loss) == 4.0


def test_a_loss_has_the_weight_that_its_gradient_was_given() -> None:
    found, parallel = closures()
    parallel.step.weights.append(100.0)  # of another backward pass, before

    def closure() -> float:
        parallel.step.weights.append(4.5)
        return 4.0

    assert found.call(closure) == 5.0
    assert found.call(lambda: 4.0) == 7.0


def test_a_batch_without_weight_may_have_any_loss_and_where_none_has_any_the_loss_is_0() -> None:
    assert closures(own_weight=0.0)[0].call(lambda: float("nan")) == 8.0
    assert closures(own_weight=0.0, others=(0.0, 0.0))[0].call(lambda: 3.0) == 0.0


def test_a_loss_keeps_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    closures()[0].call(lambda: parameter**2).backward()
    assert parameter.grad == 4.0


def test_a_closure_need_not_return_a_loss() -> None:
    assert closures()[0].call(lambda: None) is None


@pytest.mark.parametrize("returned", [(torch.ones(1), "outputs"), {"loss": 1.0}, torch.ones(3)])
def test_anything_else_cannot_be_averaged_unless_ranks_are_by_themselves(returned: Any) -> None:
    found, parallel = closures()
    with pytest.raises(TypeError, match=f"closure of an optimizer returned a `{type(returned).__name__}`: return the"):
        found.call(lambda: returned)
    parallel.step.is_joint = False
    assert found.call(lambda: returned) is returned


@pytest.mark.parametrize(("window", "shards"), [(2, None), (1, object())])
def test_a_step_of_several_batches_has_no_closure(window: int, shards: Any) -> None:
    found, parallel = closures()
    found.check()
    parallel.step.window, parallel.step.shards = window, shards
    with pytest.raises(ValueError, match=r"closure.*Omit `accumulate_grad_batches`"):
        found.check()
