"""Metrics that operators log instead of returning them, in the loops of the library and in those of users.

Covers `raysgd.trainer.worker.operator`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.trainer.worker.operator import Internals
from tests.torch.conftest import make_local  # noqa: F401  a fixture
from tests.torch.operators_for_tests import LinearOperator

Make = Callable[..., TorchTrainer]


def test_what_was_logged_joins_the_next_metrics_once() -> None:
    internals = Internals({}, None)
    internals.log("iou", 1)
    internals.log("iou", 2)
    internals.log("loss", 3)
    assert internals.completed({"loss": 4, "num_samples": 1}, None) == {"iou": 2, "loss": 4, "num_samples": 1}
    assert internals.completed({"loss": 5, "num_samples": 1}, None) == {"loss": 5, "num_samples": 1}


def test_a_logged_tensor_keeps_no_graph() -> None:
    internals = Internals({}, None)
    internals.log("norm", torch.ones((), requires_grad=True) * 2)
    assert not internals.logged["norm"].requires_grad


@pytest.mark.parametrize("name", ["num_samples", "batch_weight", "batch_count"])
def test_counters_cannot_be_logged(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`log\('{name}', \.\.\.\)`: .* Return it"):
        Internals({}, None).log(name, 1)


@pytest.mark.parametrize("name", [3, "", None])
def test_a_metric_needs_a_name(name: Any) -> None:
    with pytest.raises(TypeError, match="the first argument is the name of a metric"):
        Internals({}, None).log(name, 1)


class Logs(LinearOperator):
    """Reports the size of each batch, by every way that there is, from every rung."""

    def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
        size = float(len(target))
        self.log("size", size)
        return *super().forward(features, target), {"size_of_forward": torch.tensor(size)}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        metrics = super().train_batch(batch, batch_info)
        self.log("train_loss", -1.0)
        return {**metrics, "size_returned": metrics["num_samples"]}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        metrics = super().validate_batch(batch, batch_info)
        return {**metrics, "size_returned": metrics["num_samples"]}


class LogsInItsLoops(Logs):
    """The same with loops of its own, which see what was logged."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        self.log("outside", 7)
        return self.averaged(self.train_batch(batch, info) for batch in iterator)

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        return self.averaged(self.validate_batch(batch, info) for batch in val_iterator)

    @staticmethod
    def averaged(batches: Iterable[Any]) -> dict[str, Any]:
        rows = list(batches)
        total = sum(row["num_samples"] for row in rows)
        names = ("size", "size_of_forward", "size_returned")
        means = {name: sum(float(row[name]) * row["num_samples"] for row in rows) / total for name in names}
        return {"num_samples": total, **means}


@pytest.mark.parametrize("operator_cls", [Logs, LogsInItsLoops])
def test_logged_metrics_are_averaged_by_samples_like_those_that_are_returned(
    make_local: Make,  # noqa: F811
    operator_cls: type[Logs],
) -> None:
    trainer = make_local(operator_cls, config={"num_samples": 10})  # in batches of 4
    trained, validated = trainer.train(), trainer.validate()
    assert trained["size"] == trained["size_of_forward"] == trained["size_returned"] == (4 * 4 + 4 * 4 + 2 * 2) / 10
    assert validated["size"] == validated["size_of_forward"] == validated["size_returned"] == (4 * 12 + 1) / 13
    if operator_cls is LogsInItsLoops:
        assert trained["outside"] == 7
        assert "outside" not in validated
    else:
        assert trained["train_loss"] > 0, "what was returned goes first"


class OwnLog(LinearOperator):
    """Has had an attribute of this name for years."""

    def setup(self, config: dict[str, Any]) -> None:
        self.log = logging.getLogger("mine")  # type: ignore[method-assign, assignment]
        super().setup(config)

    def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
        return *super().forward(features, target), {"size": len(target)}


def test_an_attribute_of_the_user_by_that_name_breaks_nothing(make_local: Make) -> None:  # noqa: F811
    trainer = make_local(OwnLog)
    assert trainer.train()["size"] == 4
    assert trainer.validate()["last_size"] == 1


class FailsOnce(LinearOperator):
    """Logs, and then raises in its first batch."""

    has_failed = False

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if not FailsOnce.has_failed:
            self.log("of_the_failed_batch", 1)
            FailsOnce.has_failed = True
            raise ArithmeticError
        return super().train_batch(batch, batch_info)


def test_what_a_failed_batch_logged_is_forgotten(make_local: Make) -> None:  # noqa: F811
    trainer = make_local(FailsOnce)
    with pytest.raises(ArithmeticError):
        trainer.train()
    assert "of_the_failed_batch" not in trainer.train()


class Takes(LinearOperator):
    """Reports a metric under a name that its config gives, in one of the ways."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), **self.more("train_batch")}

    def train_epoch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().train_epoch(*args, **kwargs), **self.more("train_epoch")}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().validate_batch(batch, batch_info), **self.more("validate_batch")}

    def more(self, method: str) -> dict[str, Any]:
        return {self.config["name"]: 7.0} if self.config["method"] == method else {}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("train_batch", "epoch"),
        ("train_batch", "batch_count"),
        ("train_batch", "num_workers"),
        ("train_epoch", "seconds"),
        ("validate_batch", "seconds"),
    ],
)
def test_names_of_the_library_are_refused(make_local: Make, method: str, name: str) -> None:  # noqa: F811
    trainer = make_local(Takes, config={"method": method, "name": name})
    call = trainer.validate if method == "validate_batch" else trainer.train
    with pytest.raises(
        ValueError, match=rf"the metric name `{name}` is reserved for the library: use another, such as `my_{name}`"
    ):
        call()
