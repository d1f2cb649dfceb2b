"""Checksums of parameters, and what is compared."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.torch.parallel.tensors import sums_of
from raysgd.trainer.messages.comparison import WeightSums, check_equal


def sums(*models: torch.nn.Module, is_exact: bool = False, left_out: Collection[str] | None = ()) -> WeightSums:
    found = sums_of(models, True, lambda model: left_out, is_exact)
    assert found is not None
    return found


def one(weight: torch.Tensor) -> torch.nn.Module:
    return torch.nn.ParameterList(
        [torch.nn.Parameter(weight, requires_grad=weight.is_floating_point() or weight.is_complex())]
    )


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 16) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_and_the_sum_of_squares_are_added_up_in_float64(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    found = sums(one(weight))
    exact = weight.double().numpy()
    np.testing.assert_allclose(found.numbers, [[exact.sum(), (exact**2).sum()]], rtol=1e-9, atol=1e-9)


def test_frozen_parameters_are_compared_and_models_in_which_nothing_trains_are_not() -> None:
    partly, frozen = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False)
    partly.bias.requires_grad_(False)
    found = sums(frozen, partly)
    assert found.names == ("`weight` of model 2 (`Linear`)", "`bias` of model 2 (`Linear`)")
    assert sums_of([frozen], True, lambda model: (), False) is None


def test_what_the_library_does_not_keep_equal_is_not_compared() -> None:
    found = sums(torch.nn.Linear(2, 1), left_out={"bias"})
    assert found.names == ("`weight` of model 1 (`Linear`)",)
    assert sums_of([torch.nn.Linear(2, 1)], True, lambda model: None, False) is None


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(3, 5).to_sparse(),
        torch.randn(3, 5, device="meta"),
        torch.nn.parameter.UninitializedParameter(),
    ],
    ids=["sparse", "meta", "lazy"],
)
def test_parameters_without_numbers_are_left_out(weight: Any) -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    module.other = torch.nn.Parameter(weight) if type(weight) is torch.Tensor else weight
    found = sums(module)
    assert len(found.names) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.float64])
def test_exact_numbers_tell_the_last_bit_and_not_the_order(dtype: torch.dtype) -> None:
    weight = torch.randn(1000, dtype=dtype if dtype.is_complex else torch.float64).to(dtype)
    changed = weight.clone()
    changed[7] = changed[7] * (1 + torch.finfo(dtype).eps)
    first, flipped, last = (sums(one(each), is_exact=True).numbers for each in (weight, weight.flip(0), changed))
    assert (first == flipped).all()
    assert (first != last).any()


@pytest.mark.parametrize(
    ("optimizer_cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.003}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_other_numbers_of_threads_make_no_difference(optimizer_cls: Any, options: dict[str, Any]) -> None:
    """Of the weights either: two replicas take the same gradients, and clip and step on one and on two threads."""
    torch.manual_seed(0)
    replicas = [torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 7)) for _ in range(2)]
    replicas[1].load_state_dict(replicas[0].state_dict())
    optimizers = [optimizer_cls(replica.parameters(), foreach=False, **options) for replica in replicas]
    threads = torch.get_num_threads()
    told = {}
    try:
        for _ in range(20):
            gradients = [torch.randn_like(each) for each in replicas[0].parameters()]
            for num_threads, replica, optimizer in zip((1, 2), replicas, optimizers, strict=True):
                torch.set_num_threads(num_threads)
                for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
                    parameter.grad = gradient.clone()
                torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
        for rank, replica in enumerate(replicas):
            torch.set_num_threads(rank + 1)
            told[rank] = sums(replica)
    finally:
        torch.set_num_threads(threads)
    check_equal(told, "")


def test_it_takes_little_memory() -> None:
    model = torch.nn.Linear(1000, 1000)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums(model)
    assert max(abs(event.cpu_memory_usage) for event in profile.events()) < model.weight.nbytes / 3
