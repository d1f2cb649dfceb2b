"""What batches count by where the criterion leaves labels out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator

Make = Callable[..., TorchTrainer]
IGNORED = 0


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(9, 4, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    labels[1], labels[4:6] = IGNORED, IGNORED  # the last ones are all of a batch
    return TensorDataset(features, labels)


class Labelled(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=torch.nn.CrossEntropyLoss(ignore_index=config.get("ignored", IGNORED)),
        )
        self.register_data(validation_loader=DataLoader(data(), batch_size=2))


class Reports(Labelled):
    """Returns the loss that its config makes of the criterion's and the outputs."""

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        output, labels = self.model(batch[0]), batch[1]
        loss = self.config["loss"](self.criterion(output, labels), output, labels)
        weight = self.config.get("weight")
        more = {} if weight is None else {"batch_weight_of_val_loss": weight(labels)}
        return {"val_loss": loss, "num_samples": len(labels), **more}


class Penalized(Labelled):
    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss + output.square().mean()


def expected(loss: Callable[..., Any], ignored: int = IGNORED) -> float:
    """The loss of one batch with all samples."""
    torch.manual_seed(0)
    features, labels = data().tensors
    output = torch.nn.Linear(4, 3)(features)
    value: float = loss(torch.nn.functional.cross_entropy(output, labels, ignore_index=ignored), output, labels).item()
    return value


@pytest.mark.parametrize(
    "loss",
    [lambda loss, *_: loss, lambda loss, *_: loss.detach(), lambda loss, *_: loss.item()],
    ids=["tensor", "detached", "number"],
)
def test_the_loss_of_the_criterion_counts_by_its_labels(make_local: Make, loss: Callable[..., Any]) -> None:
    result = make_local(Reports, config={"loss": loss}).validate()
    assert result["val_loss"] == pytest.approx(expected(lambda loss, *_: loss), rel=1e-6)


def squares(loss: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def penalized(loss: torch.Tensor, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss + squares(loss, output, labels)


@pytest.mark.parametrize(
    ("operator_cls", "loss"), [(Reports, squares), (Reports, penalized), (Penalized, None)], ids=["own", "sum", "stock"]
)
def test_another_loss_beside_labels_that_do_not_count_needs_a_weight(
    make_local: Make, operator_cls: Any, loss: Any
) -> None:
    with pytest.raises(ValueError, match=r"`val_loss` is not what.*`'batch_weight_of_val_loss': \.\.\.`"):
        make_local(operator_cls, config={"loss": loss}).validate()


def test_the_weight_of_user_code_holds(make_local: Make) -> None:
    result = make_local(Reports, config={"loss": squares, "weight": len}).validate()
    assert result["val_loss"] == pytest.approx(expected(squares), rel=1e-6)


def test_any_loss_counts_by_samples_where_all_labels_do(make_local: Make) -> None:
    result = make_local(Reports, config={"loss": penalized, "ignored": -100}).validate()
    assert result["val_loss"] == pytest.approx(expected(penalized, ignored=-100), rel=1e-6)


class Attacked(Labelled):
    """Calls the criterion for other inputs, in the backward pass: instead of the loss of the batch, or beside it."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=DataLoader(data(), batch_size=2))

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        other = self.criterion(self.model(torch.ones(2, 4)), torch.tensor([1, self.criterion.ignore_index]))
        super().backward(loss + other if self.config["is_added"] else other, **options)


def test_a_criterion_that_is_called_in_backward_counts_by_its_labels(make_local: Make) -> None:
    trainer = make_local(Attacked, config={"is_added": False}, accumulate_grad_batches=2)
    assert trainer.train()["num_samples"] == 9


def test_a_sum_with_a_criterion_that_is_called_in_backward_needs_a_weight(make_local: Make) -> None:
    trainer = make_local(Attacked, config={"is_added": True, "ignored": -100}, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"some labels are ignored by the loss.*`self.backward\(loss, weight="):
        trainer.train()
