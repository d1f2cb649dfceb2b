"""Models of the meta device get memory and numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch.objects.models import fill, is_empty, refuse_states
from tests.torch.operators_for_tests import equal

CPU = torch.device("cpu")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tied() -> nn.Module:
    model = nn.ModuleDict({"in": nn.Embedding(4, 2), "out": nn.Linear(2, 4, bias=False)})
    model["out"].weight = model["in"].weight  # type: ignore[assignment]
    return model


def test_tensors_stay_the_same_objects_also_those_that_are_shared() -> None:
    model = on_meta(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [before] = model.parameters()
    fill(model, CPU)
    [weight] = model.parameters()
    assert weight is before is optimizer.param_groups[0]["params"][0]
    assert model["in"].weight is model["out"].weight  # type: ignore[index]
    assert (weight.device, weight.requires_grad, type(weight)) == (CPU, True, nn.Parameter)
    assert weight.std() > 0
    weight.sum().backward()
    optimizer.step()


def test_what_is_inside_a_module_comes_first_as_when_it_is_made() -> None:
    model = on_meta(lambda: nn.MultiheadAttention(4, 2))
    fill(model, CPU)
    assert model.out_proj.bias.tolist() == [0.0] * 4, "attention sets it, after the linear layer in it did"
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_running_statistics_begin_as_they_do() -> None:
    model = on_meta(lambda: nn.BatchNorm1d(3))
    fill(model, CPU)
    assert equal(dict(model.state_dict()), dict(nn.BatchNorm1d(3).state_dict()))


def test_what_is_frozen_stays_frozen_and_what_has_numbers_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 1)))
    model[1].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    assert (is_empty(model), is_empty(model[0])) == (True, False)
    fill(model, CPU)
    assert torch.equal(model[0].weight, before)
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, False, True]
    assert not is_empty(model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("places", torch.arange(3))


class ScaledByData(Scaled):
    def reset_parameters(self) -> None:
        self.scale.data.fill_(1.0)
        self.places = torch.arange(3)


class ScaledInPart(Scaled):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_a_module_of_your_own_says_which_numbers() -> None:
    model = on_meta(ScaledByData)
    fill(model, CPU)
    assert (model.scale.tolist(), model.places.tolist()) == ([1.0] * 3, [0, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Scaled,
            "`scale`, `places` of its `Scaled` would stay uninitialized, because `Scaled` has no `reset_parameters`",
        ),
        (
            ScaledInPart,
            "`places` of its `ScaledInPart` would stay uninitialized, because `ScaledInPart` does not set that in its",
        ),
    ],
)
def test_a_module_that_does_not_say_it_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InvalidRegistrationError, match=message):
        fill(on_meta(make), CPU)


def test_optimizers_with_a_state_from_the_start_are_refused() -> None:
    model = on_meta(lambda: nn.Linear(2, 1))
    refuse_states([torch.optim.Adam(model.parameters())])
    with pytest.raises(InvalidRegistrationError, match="got a `Adagrad`, which has a state before its first step"):
        refuse_states([torch.optim.Adagrad(model.parameters())])
