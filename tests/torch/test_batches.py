from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from raysgd.torch import batches

X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "num_features", "target"),
    [
        ((X, Y), 1, Y),
        ([X, X, Y], 2, Y),
        ({"x": X, "labels": Y}, 1, Y),
        ({"x": X, "y": Y, "targets": X}, 1, X),
        (UserDict({"x": X, "label": Y}), 1, Y),
        ({"x": X}, 1, None),
    ],
)
def test_the_target_is_the_last_part_or_has_a_known_name(batch: Any, num_features: int, target: Any) -> None:
    features, found = batches.split(batch)
    assert len(features) == num_features
    assert found is target


@pytest.mark.parametrize("batch", [X, 3, None, "text"])
def test_a_batch_without_parts_is_refused_with_the_ways_out(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot use a batch that is a .*labels.*collate_fn.*prepare_batch"):
        batches.split(batch)


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale


class TakesTarget(torch.nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return x, labels


class TakesAnything(torch.nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return sorted(inputs)


def test_a_model_gets_the_names_and_no_target_that_it_does_not_take() -> None:
    assert batches.call(Named(), ({"x": X, "scale": 2.0, "labels": Y},)).equal(2 * X)
    assert batches.call(TakesTarget(), ({"x": X, "labels": Y},)) == (X, Y)
    assert batches.call(TakesAnything(), ({"x": X, "labels": Y},)) == ["labels", "x"]
    assert batches.call(lambda **inputs: sorted(inputs), ({"x": X, "y": Y},)) == ["x", "y"]
    assert batches.call(Named(), (X, 3.0)).equal(3 * X)


def test_a_name_that_the_model_does_not_know_is_its_own_error() -> None:
    with pytest.raises(TypeError, match="'identity'"):
        batches.call(Named(), ({"x": X, "identity": Y},))


@dataclass
class Output:
    """As models of Hugging Face return it."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


LOSS = torch.tensor(0.5)


@pytest.mark.parametrize(
    ("output", "loss", "predicted"),
    [
        (X, None, X),
        ((X, Y), None, (X, Y)),
        ({"logits": X, "loss": LOSS}, LOSS, X),
        ({"out": X}, None, {"out": X}),
        (Output(X, LOSS), LOSS, X),
        (Output(X), None, X),
    ],
)
def test_loss_and_logits_are_found_in_an_output(output: Any, loss: Any, predicted: Any) -> None:
    assert batches.own_loss(output) is loss
    assert batches.prediction(output) is predicted or batches.prediction(output) == predicted


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (LOSS, (None, LOSS, None)),
        ((X, LOSS), (X, LOSS, None)),
        ([X, LOSS, 7], (X, LOSS, 7)),
    ],
)
def test_forward_may_return_the_loss_alone(returned: Any, parts: tuple[Any, ...]) -> None:
    assert all(found is part for found, part in zip(batches.parts_of_forward(returned), parts, strict=True))


def test_forward_may_return_what_the_model_did() -> None:
    output = Output(X, LOSS)
    assert batches.parts_of_forward(output) == (output, LOSS, None)


@pytest.mark.parametrize("returned", [None, X, (X,), {"out": X}, (X, LOSS, 1, 2)])
def test_anything_else_is_refused_with_what_it_may_return(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"return the loss, `\(output, loss\)`, or `\(output, loss, weight\)`"):
        batches.parts_of_forward(returned)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(5, 3), 5),
        (torch.zeros(0, 3), 0),
        ((torch.zeros(2, 3), torch.zeros(4)), 4),
        ([torch.zeros(2, 3), torch.zeros(4)], 4),
        ((torch.zeros(6, 3), torch.tensor(1.0)), 6),
        ((torch.zeros(6, 3), ["a", "b"]), 6),
        (([torch.zeros(7, 2), torch.zeros(7)], torch.zeros(3)), 3),
        ({"input_ids": torch.zeros(8, 16), "labels": torch.zeros(8)}, 8),
        ({"meta": "x", "nested": {"image": [torch.zeros(9, 3)]}}, 9),
        (({"a": torch.zeros(3)}, {"b": torch.zeros(5)}), 3),
        ((numpy.zeros((4, 2)), numpy.zeros(4)), 4),
        (["some", "raw", "texts"], 3),
        (
            (
                (torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)),
                ({"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}),
            ),
            2,
        ),
        ((torch.zeros(1, 3, 8, 8), [{"boxes": torch.zeros(5, 4)}]), 1),
        (([{"boxes": torch.zeros(5, 4)}],), 1),
        ([{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}], 2),
        ({"labels": [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}], "pixels": torch.zeros(2, 3)}, 2),
        ([{"input_ids": torch.zeros(8, 16)}], 8),
        ([], 0),
        ({}, 1),
        (torch.tensor(3.0), 1),
        ("text", 1),
        (None, 1),
        (17, 1),
    ],
)
def test_samples_are_counted_in_batches_of_any_structure(batch: Any, expected: int) -> None:
    assert batches.count_samples(batch) == expected
