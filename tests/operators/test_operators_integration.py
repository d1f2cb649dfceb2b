from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.operators import ClassificationOperator, GANOperator
from raysgd.utils import BATCH_SIZE

pytestmark = pytest.mark.integration

NUM_EPOCHS = 2


class Rings(ClassificationOperator):
    """Points in the plane, by their distance from the middle; their number does not divide by the batch size."""

    def build_model(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))

    def build_data(self, config: dict[str, Any]) -> tuple[Dataset[Any], Dataset[Any]]:
        points = torch.randn(103, 2, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(points, points.norm(dim=1).long().clamp(max=2))
        return data, TensorDataset(*data[:41])


class PairedNoise(GANOperator):
    """Every real sample brings its noise along, so it does not matter which worker trains on it.

    In the last step of a pass there is one sample left: one worker has it, the others have none.
    """

    num_samples = 49

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(self.noise_dim, 8), nn.ReLU(), nn.Linear(8, 2))

    def build_data(self, config: dict[str, Any]) -> Any:
        rng = torch.Generator().manual_seed(1)
        data = TensorDataset(*(torch.randn(self.num_samples, size, generator=rng) for size in (2, self.noise_dim)))
        return data, TensorDataset(*data[:21])

    def real_samples(self, batch: Any) -> torch.Tensor:
        real, self.noise = batch
        return real

    def sample_noise(self, num_samples: int, rng: torch.Generator | None = None) -> torch.Tensor:
        return self.noise


class Normalized(PairedNoise):
    """Batch normalization in both networks: buffers that change in every forward pass. And noise as it usually is."""

    num_samples = 53
    sample_noise = GANOperator.sample_noise

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(self.noise_dim, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def results_of(
    operator_cls: type[TrainingOperator], config: dict[str, Any], **options: Any
) -> tuple[list[dict[str, float]], dict[str, float], torch.Tensor]:
    """The results of training and validation, and each replica's weights at the end."""
    with TorchTrainer(training_operator_cls=operator_cls, config=config, **options) as trainer:
        trained = [trainer.train() for _ in range(NUM_EPOCHS)]
        validated = trainer.validate()
        return trained, validated, torch.stack(trainer.apply_all_operators(all_weights))


def all_weights(operator: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in operator._original_models for p in model.parameters()])


def means(results: dict[str, float]) -> dict[str, float]:
    """What does not depend on the number of workers: not the values of the last batch, nor their number."""
    return {name: value for name, value in results.items() if not name.startswith(("last_", "batch_count"))}


@pytest.mark.parametrize(
    ("operator_cls", "config", "num_workers"),
    [
        (Rings, {BATCH_SIZE: 12, "lr": 0.1, "optimizer": "sgd", "seed": 0}, 2),
        (PairedNoise, {BATCH_SIZE: 12, "lr": 0.01, "noise_dim": 3, "seed": 0}, 3),
    ],
    ids=["classification", "gan"],
)
def test_n_workers_train_what_one_process_would(
    ray_cluster: None, operator_cls: type[TrainingOperator], config: dict[str, Any], num_workers: int
) -> None:
    expected, expected_validated, expected_weights = results_of(operator_cls, config, use_local=True)
    trained, validated, weights = results_of(operator_cls, config, num_workers=num_workers)
    for epoch, expected_epoch in zip(trained, expected, strict=True):
        assert means(epoch) == pytest.approx(means(expected_epoch), rel=1e-4)
    assert means(validated) == pytest.approx(means(expected_validated), rel=1e-4)
    torch.testing.assert_close(weights[0], expected_weights[0], rtol=1e-3, atol=1e-5)
    assert torch.equal(weights, weights[:1].expand_as(weights)), "the replicas are not equal"


def test_a_gan_with_buffers_keeps_its_replicas_equal_though_each_draws_its_own_noise(ray_cluster: None) -> None:
    config = {BATCH_SIZE: 12, "noise_dim": 3, "seed": 0}
    with TorchTrainer(training_operator_cls=Normalized, config=config, num_workers=2) as trainer:
        noise, other_noise = trainer.apply_all_operators(lambda operator: operator.sample_noise(2))
        assert [trainer.train()["num_samples"] for _ in range(NUM_EPOCHS)] == [53, 53]
        assert trainer.validate()["num_samples"] == 21
        weights, other_weights = trainer.apply_all_operators(all_weights)
    assert torch.equal(weights, other_weights)
    assert not torch.equal(noise, other_noise)


def test_a_validation_beside_the_training_measures_what_the_same_one_inline_does(ray_cluster: None) -> None:
    """To 1e-6: a spare has other batches than two workers, whose means are rounded apart."""
    options: dict[str, Any] = {"num_workers": 2, "num_cpus_per_worker": 0.5, "config": {BATCH_SIZE: 12, "seed": 0}}
    with TorchTrainer(training_operator_cls=Rings, **options, spare_workers=1) as trainer:
        for _ in range(2):
            trainer.train()
            inline, handle = means(trainer.validate()), trainer.validate(blocking=False)
            trainer.train()
            expected = pytest.approx(inline, rel=1e-6)
            assert means(handle.result(300)) == expected
        assert means(trainer.validate()) != expected, "the training has gone on"
