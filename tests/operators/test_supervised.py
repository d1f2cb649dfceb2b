"""Operators with one model and a loss: numbers and pixels.

Covers `raysgd.operators.supervised`, whose concrete operators are little more than a loss and metrics.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassF1Score

from raysgd import TorchTrainer
from raysgd.data import IterableStream
from raysgd.operators import ClassificationOperator, RegressionOperator, SegmentationOperator
from raysgd.operators.supervised import SupervisedOperator

CONFIG = {"lr": 0.1, "batch_size": 8, "seed": 0}
RNG = torch.Generator().manual_seed(0)
X = torch.randn(53, 3, generator=RNG)
NUMBERS = 100 + X @ torch.tensor([1.0, -2.0, 0.5])
IMAGES = torch.randn(21, 1, 4, 6, generator=RNG)
CLASSES = (IMAGES[:, 0] > 0).long() + (IMAGES[:, 0] > 1).long()
HALF_UNKNOWN = torch.where(torch.arange(21).reshape(-1, 1, 1) % 3 == 0, 255, CLASSES)


class Numbers(RegressionOperator):
    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def build_data(self, config: dict[str, Any]) -> Any:
        return TensorDataset(X, NUMBERS), TensorDataset(X, NUMBERS)


class Pixels(SegmentationOperator):
    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Conv2d(1, 3, kernel_size=1)

    def build_data(self, config: dict[str, Any]) -> Any:
        target = CLASSES if config.get("ignore_index") is None else HALF_UNKNOWN
        return TensorDataset(IMAGES, target), TensorDataset(IMAGES, target)


def trainer_of(operator_cls: type[SupervisedOperator], **config: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=operator_cls, config={**CONFIG, **config}, use_local=True)


@pytest.mark.parametrize(
    ("config", "is_said"),
    [({"learning_rate": 0.1}, True), ({"learning_rate": 0.1, "lr": 0.2}, False), ({"lr": 0.2}, False)],
)
def test_a_learning_rate_under_another_name_is_warned_of(
    config: dict[str, Any], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with TorchTrainer(training_operator_cls=Numbers, config=config, use_local=True) as trainer:
        rate = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    assert rate == [config.get("lr", 0.001)]
    said = "`config['learning_rate']` has no effect, so the learning rate is 0.001: write `\"lr\"`"
    assert caplog.text.count(said) == is_said


class TestRegression:
    def test_it_learns_and_its_metrics_are_those_of_all_samples_at_once(self) -> None:
        with trainer_of(Numbers, lr=1.0) as trainer:
            losses = [trainer.train()["train_loss"] for _ in range(30)]
            result = trainer.validate()
            predicted = trainer.get_model()(X)[:, 0].detach()
        assert losses[-1] < losses[0] / 100
        errors, spread = (predicted - NUMBERS).double(), (NUMBERS.double() - NUMBERS.double().mean()).square().sum()
        explained = 1 - errors.square().sum() / spread
        assert result["val_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-5)
        assert result["val_mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)
        assert result["val_r2"] == pytest.approx(explained.item(), rel=1e-6)
        assert result["num_samples"] == 53

    def test_the_metrics_of_one_validation_know_nothing_of_the_one_before(self) -> None:
        with trainer_of(Numbers) as trainer:
            first = trainer.validate()
            trainer.get_local_operator().metrics["val_mae"].update(torch.zeros(5), torch.ones(5))  # an interrupted one
            assert trainer.validate() == first

    def test_targets_with_several_columns_are_fine(self) -> None:
        class Columns(Numbers):
            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                return torch.nn.Linear(3, 2)

            def build_data(self, config: dict[str, Any]) -> Any:
                data = TensorDataset(X, torch.stack([NUMBERS, -NUMBERS], 1))
                return data, data

        with trainer_of(Columns) as trainer:
            trainer.train()
            assert trainer.validate()["val_r2"] < 1

    def test_shapes_that_do_not_fit_are_refused_instead_of_broadcast(self) -> None:
        class Wide(Numbers):
            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                return torch.nn.Linear(3, 2)

        with (
            trainer_of(Wide) as trainer,
            pytest.raises(ValueError, match=r"predictions of shape \(8, 2\) for targets of shape \(8,\)"),
        ):
            trainer.train()


def of_known_pixels(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = torch.nn.functional.cross_entropy(scores, target, ignore_index=255, reduction="none")
    return each.sum() / (target != 255).sum()


def by_weights_of_classes() -> torch.nn.Module:
    return torch.nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 5.0]), ignore_index=255)


CRITERIA = [
    by_weights_of_classes,
    lambda: partial(torch.nn.functional.cross_entropy, ignore_index=255),
    lambda: of_known_pixels,
]


class TestSegmentation:
    def test_it_learns_and_counts_pixels_before_it_divides(self) -> None:
        with trainer_of(Pixels, num_classes=3) as trainer:
            before = trainer.validate()
            for _ in range(5):
                trainer.train()
            result = trainer.validate()
            chosen = trainer.get_model()(IMAGES).argmax(1)
        assert result["val_miou"] > before["val_miou"] + 0.1
        is_both = [((chosen == index) & (index == CLASSES)).sum().item() for index in range(3)]
        is_any = [((chosen == index) | (index == CLASSES)).sum().item() for index in range(3)]
        expected = [both / either for both, either in zip(is_both, is_any, strict=True)]
        assert result["val_iou"] == pytest.approx(expected, rel=1e-6)
        assert result["val_miou"] == pytest.approx(sum(expected) / 3, rel=1e-6)

    def test_pixels_of_the_ignored_class_count_nowhere(self) -> None:
        config = {"num_classes": 3, "ignore_index": 255, "optimizer": "sgd"}
        with trainer_of(Pixels, **config) as trainer:
            result = trainer.validate()
            scores = trainer.get_model()(IMAGES)
        loss = torch.nn.functional.cross_entropy(scores, HALF_UNKNOWN, ignore_index=255)
        assert result["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
        known = HALF_UNKNOWN != 255
        both = ((scores.argmax(1) == 0) & (HALF_UNKNOWN == 0)).sum()
        either = (((scores.argmax(1) == 0) | (HALF_UNKNOWN == 0)) & known).sum()
        assert result["val_iou"][0] == pytest.approx((both / either).item(), rel=1e-6)

    def test_small_batches_make_the_step_of_a_large_one_though_each_has_other_pixels(self) -> None:
        weights = []
        for size, window in ((4, 6), (21, 1)):
            options: dict[str, Any] = {"accumulate_grad_batches": window}
            config = {**CONFIG, "batch_size": size, "num_classes": 3, "ignore_index": 255, "optimizer": "sgd"}
            with TorchTrainer(training_operator_cls=Pixels, config=config, use_local=True, **options) as trainer:
                trainer.train()
                weights.append(trainer.get_model().weight.detach().flatten())
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("make_criterion", CRITERIA)
    def test_a_criterion_of_its_own_counts_as_in_one_batch(self, make_criterion: Any) -> None:
        class Own(Pixels):
            build_criterion = staticmethod(lambda config: make_criterion())  # type: ignore[assignment]

        config = {"num_classes": 3, "ignore_index": 255, "optimizer": "sgd", "batch_size": 4}
        options: dict[str, Any] = {"accumulate_grad_batches": 6}
        with TorchTrainer(training_operator_cls=Own, config={**CONFIG, **config}, use_local=True, **options) as trainer:
            model = copy.deepcopy(trainer.get_model())
            before, optimizer = trainer.validate()["val_loss"], torch.optim.SGD(model.parameters(), CONFIG["lr"])
            trainer.train()
            weight = trainer.get_model().weight
        loss = make_criterion()(model(IMAGES), HALF_UNKNOWN)
        loss.backward()
        optimizer.step()
        assert before == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(weight, model.weight, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("wrong", [1.5, "255", True])
    def test_an_ignored_class_that_makes_no_sense_is_refused(self, wrong: Any) -> None:
        with (
            pytest.raises(ValueError, match=r"config\['ignore_index'\]=.*index of a class"),
            trainer_of(Pixels, ignore_index=wrong),
        ):
            pass


class TestParts:
    def test_fit_needs_no_data_to_validate_on(self) -> None:
        class Unvalidated(Numbers):
            def build_data(self, config: dict[str, Any]) -> Any:
                return super().build_data(config)[0], None

        with trainer_of(Unvalidated) as trainer:
            history = trainer.fit(2)
        assert (history["epoch"], "val_loss" in history[-1]) == ([1, 2], False)

    def test_a_collator_makes_the_batches_of_datasets(self) -> None:
        class Collated(Numbers):
            def build_collator(self, config: dict[str, Any]) -> Any:
                return lambda samples: (
                    torch.stack([features for features, _ in samples]),
                    torch.stack([target + 1 for _, target in samples]),
                )

        with trainer_of(Numbers, lr=1e-9) as plain, trainer_of(Collated, lr=1e-9) as shifted:
            assert shifted.train()["train_loss"] > plain.train()["train_loss"] + 100

    def test_a_collator_makes_the_batches_of_streams_too(self) -> None:
        class Streamed(Numbers):
            def build_data(self, config: dict[str, Any]) -> Any:
                return IterableStream(list(zip(X, NUMBERS, strict=True))).batch(10)

        class Collated(Streamed):
            def build_collator(self, config: dict[str, Any]) -> Any:
                return lambda samples: (
                    torch.stack([features for features, _ in samples]),
                    torch.stack([target + 1 for _, target in samples]),
                )

        options: dict[str, Any] = {"config": {**CONFIG, "lr": 1e-9}, "split_batches": True, "use_local": True}
        with (
            TorchTrainer(training_operator_cls=Streamed, **options) as plain,
            TorchTrainer(training_operator_cls=Collated, **options) as shifted,
        ):
            assert shifted.train()["train_loss"] > plain.train()["train_loss"] + 100

    def test_metrics_can_be_others(self) -> None:
        class Scored(Pixels):
            def build_metrics(self, config: dict[str, Any]) -> Any:
                return {"val_f1": MulticlassF1Score(num_classes=3)}

        with trainer_of(Scored) as trainer:
            assert set(trainer.validate()) == {"num_samples", "batch_count", "val_loss", "last_val_loss", "val_f1"}

    def test_one_that_says_too_little_is_told_what_to_override(self) -> None:
        class Without(ClassificationOperator):
            build_criterion = SupervisedOperator.build_criterion  # type: ignore[assignment]

            def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
                return torch.nn.Linear(1, 1)

        with pytest.raises(NotImplementedError, match=r"Override `Without.build_criterion`"), trainer_of(Without):
            pass
