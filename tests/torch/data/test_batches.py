from __future__ import annotations

import multiprocessing
import signal
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from raysgd.torch import TrainingOperator
from raysgd.torch.data import batches
from raysgd.torch.objects.models import to_device

X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


@dataclass(frozen=True)
class Batch:
    """As many people write their collators."""

    x: torch.Tensor
    labels: torch.Tensor | None = None


class TargetFirst(NamedTuple):
    """A batch whose target is found by its name."""

    labels: torch.Tensor
    x: torch.Tensor


Unnamed = namedtuple("Unnamed", ["left", "right"])


@pytest.mark.parametrize(
    ("batch", "num_features", "target"),
    [
        ((X, Y), 1, Y),
        ([X, X, Y], 2, Y),
        ({"x": X, "labels": Y}, 1, Y),
        ({"x": X, "y": Y, "targets": X}, 1, X),
        (UserDict({"x": X, "label": Y}), 1, Y),
        ({"x": X}, 1, None),
        (Batch(X, Y), 1, Y),
        (Batch(X), 1, None),
        (TargetFirst(Y, X), 1, Y),
        (Unnamed(X, Y), 1, Y),
    ],
)
def test_the_target_is_the_last_part_or_has_a_known_name(batch: Any, num_features: int, target: Any) -> None:
    features, found = batches.split_batch(batch)
    assert len(features) == num_features
    assert found is target


@pytest.mark.parametrize("batch", [X, 3, None, "text"])
def test_a_batch_without_parts_is_refused_with_the_ways_out(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot use a batch that is a .*labels.*collate_fn.*prepare_batch"):
        batches.split_batch(batch)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot use an empty batch"):
        batches.split_batch([])


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
    assert batches.call_model(Named(), ({"x": X, "scale": 2.0, "labels": Y},)).equal(2 * X)
    assert batches.call_model(TakesTarget(), ({"x": X, "labels": Y},)) == (X, Y)
    assert batches.call_model(TakesAnything(), ({"x": X, "labels": Y},)) == ["labels", "x"]
    assert batches.call_model(lambda **inputs: sorted(inputs), ({"x": X, "y": Y},)) == ["x", "y"]
    assert batches.call_model(Named(), (X, 3.0)).equal(3 * X)
    assert batches.call_model(Named(), (Batch(X, Y),)).equal(X)
    assert batches.call_model(TakesTarget(), (Batch(X, Y),)) == (X, Y)


def test_a_name_that_the_model_does_not_know_is_its_own_error() -> None:
    with pytest.raises(TypeError, match="'identity'"):
        batches.call_model(Named(), ({"x": X, "identity": Y},))


@dataclass
class Output:
    """As models of Hugging Face return it."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


LOSS = torch.tensor(0.5)


class LossFirst(NamedTuple):
    """An output in which the loss comes first."""

    loss: torch.Tensor
    logits: torch.Tensor


OUTPUT, NAMED = Output(X, LOSS), LossFirst(LOSS, X)


@pytest.mark.parametrize(
    ("output", "loss", "predicted"),
    [
        (X, None, X),
        ((X, Y), None, (X, Y)),
        ({"logits": X, "loss": LOSS}, LOSS, X),
        ({"out": X}, None, {"out": X}),
        (Output(X, LOSS), LOSS, X),
        (Output(X), None, X),
        (LossFirst(LOSS, X), LOSS, X),
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
        (OUTPUT, (OUTPUT, LOSS, None)),
        (NAMED, (NAMED, LOSS, None)),
    ],
)
def test_forward_may_return_a_loss_in_several_ways(returned: Any, parts: tuple[Any, ...]) -> None:
    assert all(found is part for found, part in zip(batches.parts_of_forward(returned, object), parts, strict=True))


@pytest.mark.parametrize("parts", [LOSS, (X, LOSS), (X, LOSS, 7)])
def test_metrics_may_stand_at_the_end_of_what_forward_returns(parts: Any) -> None:
    returned = (*parts, {"iou": 1}) if isinstance(parts, tuple) else (parts, {"iou": 1})
    found, metrics = batches.without_metrics(returned)
    assert metrics == {"iou": 1}
    assert found == parts
    assert batches.without_metrics(parts) == (parts, {})


@pytest.mark.parametrize("returned", [None, X, (X,), {"out": X}, (X, LOSS, 1, 2)])
def test_anything_else_is_refused_with_what_it_may_return(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"return the loss, `\(output, loss\)`, or `\(output, loss, weight\)`"):
        batches.parts_of_forward(returned, object)


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
        ([{"input_ids": torch.zeros(8, 16), "labels": torch.zeros(8), "num_items": torch.tensor(5)}], 8),
        ([{"image": torch.zeros(3, 8, 8), "boxes": torch.zeros(5, 4)}], 1),
        ([Batch(torch.zeros(3, 8, 8), torch.zeros(5, 4))], 1),
        ([], 0),
        ({}, 1),
        (Batch(torch.zeros(6, 2), torch.zeros(6)), 6),
        ([Batch(torch.zeros(5, 4)), Batch(torch.zeros(1, 4))], 2),
        (torch.tensor(3.0), 1),
        ("text", 1),
        (None, 1),
        (17, 1),
    ],
)
def test_samples_are_counted_in_batches_of_any_structure(batch: Any, expected: int) -> None:
    assert batches.count_samples(batch) == expected


class Both(torch.nn.Module):
    """Computes its own loss, and returns both in a container of the given kind."""

    def __init__(self, returned: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.returned = torch.nn.Linear(3, 2), returned

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(x)
        return self.returned(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)


def model_output(**parts: Any) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(**parts)


class Kinds(TrainingOperator):
    """Trains on batches of the config's kind, with a model that returns another kind."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = Both(config["output"])
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        made = [config["batch"](x=torch.randn(size, 3), labels=torch.arange(size) % 2) for size in (4, 3)]
        self.register_data(train_loader=made, validation_loader=made)

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        inputs, target = super().prepare_batch(batch)
        return to_device(inputs, self.device), target


@pytest.mark.parametrize("output", [dict, Output, LossFirst, model_output])
def test_containers_of_every_kind_train_and_validate_alike(make_local: Any, output: Any) -> None:
    expected = None
    for batch in (dict, Batch, UserDict):
        trainer = make_local(Kinds, config={"batch": batch, "output": output})
        found = trainer.train(), trainer.validate()
        assert found[0]["num_samples"] == found[1]["num_samples"] == 7
        expected = expected or found
        assert found == expected
        assert 0 <= found[1]["val_accuracy"] <= 1


@pytest.mark.parametrize("batch", ["text", (), {}, None, ("one", 2), {"nested": ["text"]}], ids=repr)
def test_a_batch_without_arrays_does_not_say_how_many_samples_it_has(batch: Any) -> None:
    assert batches.samples_of(batch, 8) == 8


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 4).T, torch.tensor(True), torch.zeros(0, 2), torch.rand(4).bfloat16(), torch.rand(600, 500)],
    ids=["strided", "scalar", "empty", "bfloat16", "large"],
)
def test_what_a_loader_process_sends_arrives_as_it_was(tensor: torch.Tensor) -> None:
    process = multiprocessing.get_context("fork")
    receiver, sender = process.Pipe(duplex=False)

    def send() -> None:
        batches.TensorCollate().begin_process()
        sender.send({"x": tensor})
        signal.pause()  # who takes shared memory over asks this process

    child = process.Process(target=send, daemon=True)
    child.start()
    try:
        assert receiver.poll(60)
        received = receiver.recv()["x"]
    finally:
        child.kill()
        child.join()
    torch.testing.assert_close(received, tensor, rtol=0, atol=0)
    received.zero_()  # and may be changed
