"""What `register` accepts, and the containers it hands back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch.operator import registrar


def a_model() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(a_model().parameters(), lr=0.1)


class DuckOptimizer:
    """Steps, and that is all that it has in common with torch's."""

    def step(self) -> None: ...


class IterableOptimizer(torch.optim.SGD):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("container", "kind"),
    [
        (list, list),
        (tuple, tuple),
        (lambda items: (item for item in items), list),
        (lambda items: dict(enumerate(items)).values(), list),
        (lambda items: {*items}, list),
        (iter, list),
    ],
    ids=["list", "tuple", "generator", "dict view", "set", "iterator"],
)
def test_several_models_come_back_in_the_container_they_came_in(container: Any, kind: type) -> None:
    models = [a_model(), a_model()]
    parts = registrar.models_of(container(models))
    assert {*parts.items} == {*models}
    mirrored = parts.mirror(["first", "second"])
    assert type(mirrored) is kind
    assert list(mirrored) == ["first", "second"]


@pytest.mark.parametrize("container", [list, tuple])
def test_a_container_of_one_stays_a_container(container: type) -> None:
    parts = registrar.models_of(container([a_model()]))
    assert parts.mirror(["only"]) == container(["only"])


@pytest.mark.parametrize(
    "model",
    [
        a_model(),
        torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
        torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]),
        torch.nn.Sequential(),
    ],
    ids=["plain", "Sequential", "ModuleList", "empty Sequential"],
)
def test_a_module_is_one_model_even_if_it_is_iterable(model: torch.nn.Module) -> None:
    parts = registrar.models_of(model)
    assert parts.items == [model]
    assert parts.mirror([model]) is model


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "NoneType"),
        ("model", "str"),
        (torch.zeros(2), "Tensor"),
        (3, "int"),
        ([torch.nn.Linear(1, 1), "model"], "str"),
        ({"model": torch.nn.Linear(1, 1)}, "dict"),
        (torch.nn.Linear, "the class `Linear` instead of an object of it"),
        ([], "nothing"),
    ],
)
def test_what_is_no_model_is_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(InvalidRegistrationError, match=named):
        registrar.models_of(given)


@pytest.mark.parametrize("kind", [AssertionError, TypeError, ValueError])
def test_a_refusal_is_of_every_class_that_callers_may_expect(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"torch\.nn\.Module"):
        registrar.models_of(["not a model"])


@pytest.mark.parametrize(
    "optimizer", [an_optimizer(), DuckOptimizer(), IterableOptimizer(a_model().parameters(), lr=0.1)]
)
def test_a_single_optimizer_is_one_also_if_iterable_or_only_like_one(optimizer: Any) -> None:
    parts = registrar.optimizers_of(optimizer)
    assert parts.items == [optimizer]
    assert parts.mirror([optimizer]) is optimizer


@pytest.mark.parametrize("container", [list, tuple])
def test_several_optimizers_come_back_in_the_container_they_came_in(container: type) -> None:
    given = container([an_optimizer(), DuckOptimizer()])
    parts = registrar.optimizers_of(given)
    assert parts.mirror(parts.items) == given


@pytest.mark.parametrize("given", [None, "sgd", 0.1, [an_optimizer(), None]])
def test_what_cannot_step_is_no_optimizer(given: Any) -> None:
    with pytest.raises(InvalidRegistrationError):
        registrar.optimizers_of(given)


@pytest.mark.parametrize("given", [None, False])
def test_no_schedulers_are_none(given: Any) -> None:
    assert registrar.schedulers_of(given) is None


@pytest.mark.parametrize("container", [list, tuple])
def test_an_empty_container_of_schedulers_counts_as_registered(container: type) -> None:
    parts = registrar.schedulers_of(container())
    assert parts is not None
    assert parts.mirror(parts.items) == container()


def test_a_scheduler_that_cannot_be_iterated_is_one() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(an_optimizer(), step_size=1)
    parts = registrar.schedulers_of(scheduler)
    assert parts is not None
    assert parts.mirror(parts.items) is scheduler


def test_several_schedulers_come_back_in_the_container_they_came_in() -> None:
    given = tuple(torch.optim.lr_scheduler.StepLR(an_optimizer(), step_size=1) for _ in range(2))
    parts = registrar.schedulers_of(given)
    assert parts is not None
    assert parts.mirror(parts.items) == given
