from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators import GANOperator
from raysgd.operators.gan import frozen
from raysgd.utils import BATCH_SIZE
from tests.torch.lab import validate_on_spare


class Bell(GANOperator):
    """Learns to draw numbers around 3."""

    def build_discriminator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))

    def build_generator(self, config: dict[str, Any]) -> nn.Module:
        return nn.Linear(self.noise_dim, 1)

    def build_data(self, config: dict[str, Any]) -> Any:
        numbers = 3 + torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
        return numbers, numbers[:50]


CONFIG = {"noise_dim": 4, "batch_size": 20, "seed": 0}


def local_trainer(operator_cls: type[GANOperator] = Bell, **options: Any) -> TorchTrainer:
    options.setdefault("config", CONFIG)
    return TorchTrainer(training_operator_cls=operator_cls, use_local=True, **options)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def test_a_spare_measures_what_the_worker_whose_state_it_has_does() -> None:
    before, inline, beside = validate_on_spare(Bell, CONFIG)
    assert beside == inline != before
    assert {"val_loss_d", "val_loss_g"} <= beside.keys()


class TestTraining:
    def test_the_generator_learns_where_the_samples_are(self) -> None:
        with local_trainer(config={**CONFIG, "lr": 0.02}) as trainer:
            for _ in range(30):
                trained = trainer.train()
            _, generator = trainer.get_model()
            with torch.no_grad():
                drawn = generator(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)))
        assert drawn.mean().item() == pytest.approx(3, abs=0.75)
        assert (trained["num_samples"], trained["batch_count"], trained["epoch"]) == (200, 10, 30)
        assert {"loss_d", "loss_g", "last_loss_d", "last_loss_g"} <= trained.keys()

    @pytest.mark.parametrize(("moving", "resting"), [(0, 1), (1, 0)])
    def test_each_optimizer_moves_its_own_network_alone(self, moving: int, resting: int) -> None:
        class OneRests(Bell):
            def build_optimizers(self, discriminator: nn.Module, generator: nn.Module, config: dict[str, Any]) -> Any:
                networks = (discriminator, generator)
                return [
                    torch.optim.SGD(network.parameters(), lr=0.1 if index == moving else 0.0)
                    for index, network in enumerate(networks)
                ]

        with local_trainer(OneRests) as trainer:
            before = [weights(network) for network in trainer.get_model()]
            trainer.train(num_steps=1)
            after = [weights(network) for network in trainer.get_model()]
        assert not torch.equal(before[moving], after[moving])
        assert torch.equal(before[resting], after[resting])

    def test_the_step_of_the_generator_leaves_the_gradients_of_the_discriminator_alone(self) -> None:
        seen = []

        class Watching(Bell):
            def generator_loss(self, generated: torch.Tensor) -> torch.Tensor:
                seen.append(self.discriminator[0].weight.grad.clone())  # type: ignore[index]
                return super().generator_loss(generated)

        with local_trainer(Watching) as trainer:
            trainer.train(num_steps=1)
            discriminator, _ = trainer.get_model()
        assert torch.equal(discriminator[0].weight.grad, seen[0])
        assert seen[0].abs().sum() > 0

    def test_the_losses_can_be_exchanged_alone(self) -> None:
        class Wasserstein(Bell):
            def discriminator_loss(self, real: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
                return self.discriminator(generated).mean() - self.discriminator(real).mean()

            def generator_loss(self, generated: torch.Tensor) -> torch.Tensor:
                return -self.discriminator(generated).mean()

        with local_trainer(Wasserstein) as trainer:
            losses = [trainer.train()["loss_d"] for _ in range(5)]
        assert losses[-1] < losses[0]
        assert losses[-1] < 0  # what cross-entropy cannot be

    @pytest.mark.parametrize("kind", ["tensors", "with labels"])
    def test_labels_in_a_batch_are_left_alone(self, kind: str) -> None:
        class Labelled(Bell):
            def build_data(self, config: dict[str, Any]) -> Any:
                numbers = torch.randn(40, 1)
                return numbers if kind == "tensors" else torch.utils.data.TensorDataset(numbers, torch.zeros(40))

        with local_trainer(Labelled) as trainer:
            assert trainer.train()["num_samples"] == 40

    def test_a_seed_decides_everything_and_another_seed_differently(self) -> None:
        def losses(seed: int) -> dict[str, float]:
            with local_trainer(config={**CONFIG, "seed": seed}) as trainer:
                return trainer.train()

        assert losses(1) == losses(1)
        assert losses(1) != losses(2)

    def test_the_options_reach_the_parts(self) -> None:
        config = {"noise_dim": 2, BATCH_SIZE: 50, "lr": 0.5, "lr_generator": 0.25}
        with local_trainer(config=config) as trainer:
            assert trainer.train(num_steps=None)["batch_count"] == 4
            state = trainer.state_dict()
        assert [optimizer["param_groups"][0]["lr"] for optimizer in state["optimizers"]] == [0.5, 0.25]
        assert state["models"][1]["weight"].shape == (1, 2)


class TestValidation:
    def test_it_repeats_itself_and_draws_nothing_from_the_training(self) -> None:
        with local_trainer() as trainer:
            trainer.train()
            before = torch.get_rng_state()
            assert trainer.validate() == trainer.validate()
            assert torch.equal(torch.get_rng_state(), before)

    def test_the_hook_adds_scores_of_as_many_samples_as_are_real(self) -> None:
        class Scored(Bell):
            def score_samples(self, real: torch.Tensor, generated: torch.Tensor) -> dict[str, Any]:
                assert not self.discriminator.training
                assert not self.generator.training
                assert not torch.is_grad_enabled()
                return {"gap": (real.mean() - generated.mean()).abs(), "excess": float(len(generated) - len(real))}

        with local_trainer(Scored) as trainer:
            scores = trainer.validate()
            trainer.train(num_steps=1)
            operator: Any = trainer.get_local_operator()
            assert operator.discriminator.training
            assert operator.generator.training
        assert (scores["num_samples"], scores["batch_count"]) == (50, 3)
        assert scores["gap"] > 0
        assert scores["excess"] == 0

    def test_without_the_hook_it_reports_both_losses(self) -> None:
        with local_trainer() as trainer:
            scores = trainer.validate()
        assert {name for name in scores if not name.startswith("last_")} == {
            "val_loss_d",
            "val_loss_g",
            "num_samples",
            "batch_count",
        }


class TestPrediction:
    def test_the_generator_makes_a_sample_of_each_row_of_noise(self) -> None:
        noise = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
        with local_trainer() as trainer:
            trainer.train()
            _, generator = trainer.get_model()
            expected = generator(noise).detach()
            for data in (noise, torch.utils.data.TensorDataset(noise)):
                torch.testing.assert_close(trainer.predict(data, batch_size=3), expected)


class TestRefusals:
    @pytest.mark.parametrize("part", ["build_discriminator", "build_generator", "build_data"])
    def test_a_part_that_is_not_given(self, part: str) -> None:
        lacking = type("Lacking", (Bell,), {part: getattr(GANOperator, part)})
        with pytest.raises(NotImplementedError, match=f"Override `Lacking.{part}`"):
            local_trainer(lacking)

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"lr_generator": 0}, r"`config\['lr_generator'\]=0`"),
            ({"noise_dim": 1.5}, r"`config\['noise_dim'\]=1.5`"),
        ],
    )
    def test_a_config_that_makes_no_sense(self, config: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            local_trainer(config=config)

    def test_one_optimizer_only(self) -> None:
        class Lonely(Bell):
            def build_optimizers(self, discriminator: nn.Module, generator: nn.Module, config: dict[str, Any]) -> Any:
                return [torch.optim.SGD(generator.parameters(), lr=0.1)]

        with pytest.raises(TypeError, match="returned 1 optimizers: return two"):
            local_trainer(Lonely)


class TestFrozen:
    def test_what_was_frozen_before_stays_so(self) -> None:
        model = nn.Linear(1, 1)
        model.bias.requires_grad_(False)
        with frozen(model):
            assert not model.weight.requires_grad
        assert [parameter.requires_grad for parameter in (model.weight, model.bias)] == [True, False]

    def test_an_error_inside_does_not_leave_it_frozen(self) -> None:
        model = nn.Linear(1, 1)
        with pytest.raises(KeyError), frozen(model):
            raise KeyError
        assert model.weight.requires_grad
