"""Changes of what one worker in this process trains: entries of its config, its class, its seed.

Covers `raysgd.trainer.driver.live_changes`, `raysgd.trainer.driver.trainer` and `raysgd.torch.operator.internals`, too:
what trainers of all frameworks can change, and how learning rates follow the config.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from raysgd.core.engine.shared.types import World
from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.torch.operators_for_tests import NUM_FEATURES, DropoutOperator, equal

Make = Callable[..., TorchTrainer]


class Scheduled(DropoutOperator):
    """Two groups of parameters, one with a rate of its own, momentum, and a schedule."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        first, *others = self.model.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": 0.005}]
        optimizer = torch.optim.SGD(groups, lr=config["lr"], momentum=config["momentum"])
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=self.model,
            optimizers=optimizer,
            criterion=self.criterion,
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        )


CONFIG = {"lr": 0.004, "momentum": 0.9, "note": "first", "num_samples": 22}


def scheduled(make_local: Make, operator_cls: type[DropoutOperator] = Scheduled, **options: Any) -> TorchTrainer:
    return make_local(operator_cls, config=CONFIG, scheduler_step_freq="epoch", **options)


def rates(trainer: TorchTrainer) -> list[Any]:
    return rates_of(trainer.get_local_operator())


def rates_of(operator: Any) -> list[Any]:
    return [(group["lr"], group["momentum"]) for group in operator.optimizer.param_groups]


class WithLowest(Scheduled):
    """Has a schedule that ends at a rate of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9, eta_min=0.001)
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion, schedulers=scheduler)
        self.scheduler = scheduler


class Faster(WithLowest):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "lr": 0.04})


class Warmed(DropoutOperator):
    """Warms up, then decays; or has cuts by a plateau, one in each step."""

    rate: float | None = None

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate or config["lr"])
        schedulers = torch.optim.lr_scheduler
        if config["cuts"]:
            scheduler: Any = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        else:
            warm_up = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
            decay = schedulers.LambdaLR(optimizer, lambda step: 0.5**step)
            scheduler = schedulers.SequentialLR(optimizer, [warm_up, decay], [2])
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=self.model,
            optimizers=optimizer,
            criterion=self.criterion,
            schedulers=scheduler,
        )


@pytest.mark.parametrize("way", ["update_config", "take_state_of", "reload"])
@pytest.mark.parametrize("cuts", [False, True])
def test_a_rate_that_is_set_later_multiplies_the_schedule(make_local: Make, way: str, cuts: bool) -> None:
    class Edited(Warmed):
        rate = 0.008

    options: dict[str, Any] = {"scheduler_step_freq": "manual"}
    config = {"lr": 0.004, "num_samples": 8, "cuts": cuts}
    trainer, fast = (make_local(Warmed, config={**config, "lr": rate}, **options) for rate in (0.004, 0.008))

    def step(each: TorchTrainer) -> float:
        each.train()
        each.apply_all_operators(lambda operator: operator.scheduler.step(*[1.0] * cuts))
        return rate_of(each)

    def rate_of(each: TorchTrainer) -> float:
        rate: float = each.get_local_operator().optimizer.param_groups[0]["lr"]
        return rate

    for each in (trainer, fast):
        step(each)
        step(each)
    expected = rate_of(fast)
    if way == "update_config":
        trainer.update_config(lr=0.008)
    elif way == "reload":
        trainer.reload(Edited)
    else:
        other = make_local(Warmed, config={**config, "lr": 0.008}, **options)
        other.take_state_of(trainer)
        trainer = other
    assert rate_of(trainer) == pytest.approx(expected)
    for _ in range(3):
        assert step(trainer) == pytest.approx(step(fast))


class TestUpdatingTheConfig:
    def test_learning_rates_follow_and_keep_their_place_in_the_schedule(self, make_local: Make) -> None:
        trainer = scheduled(make_local)
        trainer.train()
        momenta = trainer.state_dict()["optimizers"][0]["state"]
        trainer.update_config(lr=0.04)
        assert rates(trainer) == [(0.02, 0.9), (0.0025, 0.9)], "the second rate never was that of the config"
        assert equal(trainer.state_dict()["optimizers"][0]["state"], momenta)
        assert (trainer.config["lr"], trainer.get_local_operator().config["lr"]) == (0.04, 0.04)
        trainer.train()
        assert rates(trainer)[0][0] == pytest.approx(0.01), "the schedule goes on from the new rate"
        trainer.update_config(lr=0.004)
        assert rates(trainer)[0][0] == pytest.approx(0.001), "and follows a second time"

    def test_what_cannot_follow_is_refused_and_changes_nothing(self, make_local: Make) -> None:
        trainer = scheduled(make_local, WithLowest)
        trainer.train()
        before = trainer.state_dict(), rates(trainer)
        with pytest.raises(ValueError, match=r"`CosineAnnealingLR` .*\(`eta_min`\).*a `LambdaLR`"):
            trainer.update_config(lr=0.04)
        with pytest.raises(ValueError, match=r"`CosineAnnealingLR` .*\(`eta_min`\)"):
            trainer.reload(Faster)
        assert equal((trainer.state_dict(), rates(trainer)), before)
        assert (trainer.config["lr"], trainer.training_operator_cls) == (0.004, WithLowest)

    def test_another_number_that_an_optimizer_has_needs_a_hook(self, make_local: Make) -> None:
        class Hooked(Scheduled):
            def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
                super().config_changed(config, changed)
                for group in self.optimizer.param_groups:
                    group["momentum"] = config["momentum"]

        trainer = scheduled(make_local)
        with pytest.raises(ValueError, match=r"set `group\['momentum'\]` in `self.optimizer.param_groups`"):
            trainer.update_config(lr=0.04, momentum=0.8)
        assert (rates(trainer), dict(trainer.config)) == ([(0.004, 0.9), (0.005, 0.9)], CONFIG)
        hooked = scheduled(make_local, Hooked)
        hooked.update_config(lr=0.04, momentum=0.8)
        assert rates(hooked) == [(0.04, 0.8), (0.005, 0.8)]

    def test_names_that_the_config_lacks_are_refused_with_a_guess(self, make_local: Make) -> None:
        trainer = scheduled(make_local)
        with pytest.raises(ValueError, match=r"has no `momentun`\. Did you mean `momentum`\? It has `lr`, `momentum`"):
            trainer.update_config(lr=1.0, momentun=0.8)
        assert (rates(trainer)[0][0], dict(trainer.config)) == (0.004, CONFIG)

    @pytest.mark.parametrize("rate", ["x", None, True, math.nan, -1.0])
    def test_what_is_no_learning_rate_is_refused(self, make_local: Make, rate: Any) -> None:
        trainer = scheduled(make_local)
        with pytest.raises(ValueError, match=rf"`lr={rate!r}`: need a finite number, 0 or more"):
            trainer.update_config(lr=rate)
        assert rates(trainer) == [(0.004, 0.9), (0.005, 0.9)]
        assert (dict(trainer.config), trainer.get_local_operator().config["lr"]) == (CONFIG, 0.004)
        trainer.update_config(lr=0.04)
        assert rates(trainer)[0] == (0.04, 0.9)

    def test_the_batch_size_needs_new_loaders(self, make_local: Make) -> None:
        trainer = make_local(config={BATCH_SIZE: 4})
        with pytest.raises(ValueError, match=r"loaders are made with it\. Use `reset_config`"):
            trainer.update_config(**{BATCH_SIZE: 8})

    def test_an_entry_that_no_optimizer_has_is_told(self, make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
        trainer = scheduled(make_local)
        with caplog.at_level(logging.WARNING, "raysgd"):
            trainer.update_config(note="second", lr=0.1)
        assert "no optimizer follows `config['note']`" in caplog.text
        assert trainer.get_local_operator().config["note"] == "second"

    def test_the_hook_sees_what_was_there_before(self, make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
        class Hooked(Scheduled):
            def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
                self.seen_by_hook = (changed["note"], config["note"])

        trainer = scheduled(make_local, Hooked)
        trainer.update_config(note="second", lr=0.1)
        assert trainer.get_local_operator().seen_by_hook == ("first", "second")  # type: ignore[attr-defined]
        assert rates(trainer)[0][0] == 0.004, "without `super` nothing follows"
        assert not caplog.records

    def test_a_hook_that_raises_refuses_the_change(self, make_local: Make) -> None:
        class Refuses(Scheduled):
            def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
                super().config_changed(config, changed)
                if config["lr"] > 1:
                    raise OverflowError("too large")

        trainer = scheduled(make_local, Refuses)
        trainer.train()
        before = trainer.state_dict(), rates(trainer)
        with pytest.raises(OverflowError, match="too large"):
            trainer.update_config(lr=7.0)
        assert equal((trainer.state_dict(), rates(trainer)), before)
        assert (dict(trainer.config), trainer.get_local_operator().config) == (CONFIG, CONFIG)
        trainer.update_config(lr=0.04)
        assert rates(trainer)[0][0] == 0.02


class Told(Scheduled):
    """Notes what it is set up with, and what it is told of changes."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.told: list[Any] = [config["note"]]

    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        super().config_changed(config, changed)
        self.told.append((changed, config["note"], config["lr"]))


def test_an_operator_that_is_made_later_is_set_up_and_told_as_the_others_were(make_local: Make) -> None:
    trainer = scheduled(make_local, Told)

    def told_of() -> list[Any]:
        runner = trainer._life.replicas(World(0, 1))
        runner.setup()
        assert (runner.operator.config, rates_of(runner.operator)) == (dict(trainer.config), rates(trainer))
        told: list[Any] = runner.operator.told
        runner.shutdown()
        return told

    trainer.update_config(note="second", lr=0.1)
    trainer.update_config(note="third")
    expected = ["first", ({"note": "first", "lr": 0.004}, "second", 0.1), ({"note": "second"}, "third", 0.1)]
    assert trainer.get_local_operator().told == told_of() == expected
    trainer.reload(Told)
    assert trainer.get_local_operator().told == told_of() == ["third"]
    trainer.update_config(note="fourth")
    assert trainer.get_local_operator().told == told_of() == ["third", ({"note": "third"}, "fourth", 0.1)]
    trainer.reset_config({**CONFIG, "note": "fifth"})
    assert trainer.get_local_operator().told == told_of() == ["fifth"]


class Counted(Scheduled):
    """An edited class: reports more, and has a method that the one before has not."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edited": self.edition()}

    def edition(self) -> int:
        return 2


class Raises(Scheduled):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        torch.rand(3)
        raise ZeroDivisionError("while it was edited")


class Wider(Scheduled):
    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 9), torch.nn.Dropout(0.5), torch.nn.Linear(9, 1))


class TwoModels(Scheduled):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register(models=[self.model, torch.nn.Linear(1, 1)], optimizers=self.optimizer, schedulers=self.scheduler)


class TestReloading:
    def test_an_edited_class_goes_on_to_the_last_bit(self, make_local: Make) -> None:
        edited, alone = scheduled(make_local, seed=3), scheduled(make_local, seed=3)
        results: list[Any] = []
        for trainer in (edited, alone):
            torch.manual_seed(5)  # they share the generators of this process
            trainer.train()
            trainer.train(num_steps=2)
            if trainer is edited:
                trainer.reload(Counted)
            results.append((trainer.train(num_steps=3), trainer.state_dict()))
        assert results[0][0].pop("edited") == results[0][0].pop("last_edited") == 2
        assert equal(results[0], results[1])
        assert edited.training_operator_cls is Counted
        assert type(edited.get_local_operator()) is Counted

    @pytest.mark.parametrize(
        ("operator_cls", "error", "message"),
        [
            (Raises, ZeroDivisionError, "while it was edited"),
            (Wider, ValueError, r"shapes: \['0.weight: \(8, 3\) instead of \(9, 3\)'"),
            (TwoModels, ValueError, "holds 1 models, but the operator registered 2"),
            (dict, TypeError, "need a subclass of `TrainingOperator`"),
        ],
    )
    def test_a_class_that_cannot_go_on_is_refused(
        self, make_local: Make, operator_cls: Any, error: type[Exception], message: str
    ) -> None:
        refused, alone = scheduled(make_local), scheduled(make_local)
        results = []
        for trainer in (refused, alone):
            torch.manual_seed(5)
            trainer.train(num_steps=2)
            if trainer is refused:
                operator = trainer.get_local_operator()
                with pytest.raises(error, match=message):
                    trainer.reload(operator_cls)
                assert trainer.get_local_operator() is operator
                assert trainer.training_operator_cls is Scheduled
            results.append((trainer.train(), trainer.validate(), trainer.state_dict()))
        assert equal(results[0], results[1])

    def test_hyperparameters_that_were_edited_are_taken_and_others_left(self, make_local: Make) -> None:
        class Edited(Scheduled):
            def setup(self, config: dict[str, Any]) -> None:
                super().setup({**config, "momentum": 0.7})

        trainer = scheduled(make_local)
        trainer.train()
        trainer.get_local_operator().optimizer.param_groups[0]["dampening"] = 0.1
        trainer.reload(Edited)
        assert rates(trainer) == [(0.002, 0.7), (0.0025, 0.7)]
        assert trainer.get_local_operator().optimizer.param_groups[0]["dampening"] == 0.1

    def test_it_can_be_edited_again_and_again(self, make_local: Make) -> None:
        trainer = scheduled(make_local)
        for operator_cls in (Counted, Scheduled, Counted):
            trainer.reload(operator_cls)
            assert ("edited" in trainer.train()) == (operator_cls is Counted)
        assert trainer.train()["epoch"] == 4


class Random(DropoutOperator):
    """Draws its weights and the order of its data from the global generators."""

    def setup(self, config: dict[str, Any]) -> None:
        model = self.make_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.05), criterion=torch.nn.MSELoss()
        )
        self.seen: list[list[int]] = []
        from tests.torch.operators_for_tests import dataset

        self.register_data(train_loader=self.make_loader(dataset(20), shuffle=True))


class TestTheSeed:
    def run(self, trainer: TorchTrainer) -> Any:
        results = [trainer.train() for _ in range(2)]
        return results, trainer.get_local_operator().seen, trainer.state_dict()  # type: ignore[attr-defined]

    def test_a_run_is_repeated_to_the_last_bit(self, make_local: Make) -> None:
        first = self.run(make_local(Random, seed=4))
        torch.rand(7)
        assert equal(self.run(make_local(Random, seed=4)), first)
        assert not equal(self.run(make_local(Random, seed=5)), first)

    def test_beginning_again_seeds_again(self, make_local: Make) -> None:
        trainer = make_local(Random, seed=4)
        first = self.run(trainer)
        trainer.reset_config()
        assert equal(self.run(trainer), first)

    @pytest.mark.parametrize("seed", [-1, 2**31, 1.5, "1", True])
    def test_what_is_no_seed_is_refused(self, make_local: Make, seed: Any) -> None:
        with pytest.raises(ValueError, match=r"`seed=.*`: need an integer from 0 to 2147483647, or None"):
            make_local(Random, seed=seed)
