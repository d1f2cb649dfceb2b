"""Changes of what one worker in this process trains with Keras: entries of its config, its class, its state, its rates.

Covers `raysgd.trainer.worker.runner` and `raysgd.tf.objects.registration`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.tf import TFTrainer
from raysgd.tf.objects.registration import differing_rates
from raysgd.tune.population import Population
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.tf.lab import largest_difference
from tests.tf.models import Line, make_data, make_model

Make = Callable[..., TFTrainer]

CONFIG = {"lr": 0.04, "optimizer": "adam", "layers": "dropout", "note": "first"}


@pytest.fixture
def make_local(keras_here: Any) -> Iterator[Make]:
    """Make trainers with one worker in this process, and shut them down behind the test."""
    trainers = []

    def make(operator_cls: Any = Line, **options: Any) -> TFTrainer:
        options = {"config": CONFIG, "seed": 3, **options}
        trainers.append(TFTrainer(training_operator_cls=operator_cls, use_local=True, **options))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.shutdown()


def rate(trainer: TFTrainer) -> float:
    return round(float(trainer.get_local_operator().optimizer.learning_rate.numpy()), 6)


def is_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two states are equal to the last bit."""
    return left["epoch"] == right["epoch"] and not any(
        largest_difference(left, right, part) for part in ("models", "optimizers")
    )


def test_what_a_step_depends_on_follows_the_config(make_local: Make) -> None:
    trainer = make_local()
    found = [controller_of(trainer).facts[0].keeps_global_batch]
    trainer.reset_config({**CONFIG, BATCH_SIZE: 8})
    found.append(controller_of(trainer).facts[0].keeps_global_batch)
    assert found == [False, True]


@pytest.mark.parametrize("options", [{"model_creator": make_model, "data_creator": make_data}, {"split_batches": True}])
def test_a_batch_of_all_workers_is_known_as_such(options: dict[str, Any], make_local: Make) -> None:
    trainer = make_local(None if "model_creator" in options else Line, **options)
    assert controller_of(trainer).facts[0].keeps_global_batch


class Counted(Line):
    """An edited class."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edited": 2}


class Raises(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        np.random.rand(3)
        raise ZeroDivisionError("while it was edited")


class Wider(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "layers": "batch_norm"})


class Faster(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "lr": 0.07})


class Hooked(Line):
    def config_changed(self, config: dict[str, Any], changed: Mapping[str, Any]) -> None:
        if config["lr"] > 1:
            raise OverflowError("too large")
        self.optimizer.learning_rate.assign(config["lr"])


@pytest.mark.keras_in_turns("keras3")
class TestReloading:
    def test_an_edited_class_goes_on_to_the_last_bit(self, make_local: Make, keras: str) -> None:
        results: list[Any] = []
        layers = "dropout" if keras == "keras3" else "dense"  # the generators of tf_keras cannot be read
        for reloads in (True, False):
            trainer = make_local(config={**CONFIG, "layers": layers})
            trainer.train()
            trainer.train(num_steps=2)
            if reloads:
                trainer.reload(Counted)
                assert type(trainer.get_local_operator()) is Counted
            results.append((trainer.train(num_steps=3), trainer.state_dict()))
        (edited, state), (alone, expected) = results
        assert edited.pop("edited") == edited.pop("last_edited") == 2
        assert edited == alone
        assert is_same(state, expected)

    def test_a_class_that_cannot_go_on_is_refused(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.train(num_steps=2)
        before, operator, drawn = trainer.state_dict(), trainer.get_local_operator(), np.random.get_state()
        cases: list[tuple[Any, type[Exception], str]] = [
            (Raises, ZeroDivisionError, "while it was edited"),
            (Wider, ValueError, "does not match the variables of this trainer|has 4 arrays"),
            (dict, TypeError, "need a subclass of `raysgd.tf.TrainingOperator`"),
        ]
        for operator_cls, error, message in cases:
            with pytest.raises(error, match=message):
                trainer.reload(operator_cls)
        assert np.array_equal(np.random.get_state()[1], drawn[1])  # type: ignore[arg-type]
        assert trainer.get_local_operator() is operator
        assert trainer.training_operator_cls is Line
        assert is_same(trainer.state_dict(), before)
        assert trainer.train()["epoch"] == 1

    @pytest.mark.soak
    def test_a_learning_rate_that_was_edited_is_taken_and_another_left(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.get_local_operator().optimizer.learning_rate.assign(0.02)
        trainer.reload(Counted)
        assert rate(trainer) == 0.02
        trainer.reload(Faster)
        assert rate(trainer) == 0.07


@pytest.mark.soak
class TestUpdatingTheConfig:
    def test_a_hook_gives_the_optimizer_the_new_rate(self, make_local: Make) -> None:
        trainer = make_local(Hooked)
        trainer.update_config(lr=0.05)
        assert (rate(trainer), trainer.config["lr"], trainer.get_local_operator().config["lr"]) == (0.05, 0.05, 0.05)
        with pytest.raises(OverflowError, match="too large"):
            trainer.update_config(lr=7.0)
        assert (rate(trainer), trainer.config["lr"], trainer.get_local_operator().config["lr"]) == (0.05, 0.05, 0.05)


@pytest.mark.keras_in_turns("keras3")
def test_a_trainer_of_creators_says_what_it_cannot_do(keras_here: Any) -> None:
    trainer = TFTrainer(make_model, make_data, {"lr": 0.1}, use_local=True)
    with trainer, pytest.raises(ValueError, match="needs an operator class, but this trainer has creator functions"):
        trainer.reload(Line)


@pytest.mark.keras_in_turns("keras3")
def test_a_rate_that_no_optimizer_follows_is_told(keras_here: Any, caplog: pytest.LogCaptureFixture) -> None:
    with TFTrainer(make_model, make_data, {"lr": 0.1, "fit_config": {}}, use_local=True) as trainer:
        trainer.update_config(fit_config={"epochs": 2})
        assert "no optimizer follows" not in caplog.text
        trainer.update_config(lr=0.2)
    assert "no optimizer follows `config['lr']`" in caplog.text


@pytest.mark.keras_in_turns("keras3")
def test_rows_of_creators_are_numbered_by_the_state_that_was_loaded(keras_here: Any, tmp_path: Path) -> None:
    with TFTrainer(make_model, make_data, {"lr": 0.1}, use_local=True) as trainer:
        trainer.train()
        trainer.save(tmp_path / "saved")
        trainer.train()
        trainer.load(tmp_path / "saved")
        assert [row["epoch"] for row in trainer.fit(2)] == [2, 3]
        assert [row["epoch"] for row in trainer.history] == [1, 2, 2, 3]


@pytest.mark.soak
class TestAPopulation:
    def test_a_member_copies_another_one_and_keeps_the_rate_of_its_own_config(self, make_local: Make) -> None:
        def make(config: dict[str, Any]) -> TFTrainer:
            return make_local(config={**CONFIG, **config})

        with Population(make, {"lr": [0.02, 0.03]}, size=2, seed=0) as population:
            population.train()
            worse, better = population.members
            population.copy(worse, better, {**CONFIG, "lr": 0.01})
            assert rate(worse.trainer) == 0.01
            assert is_same_but_for_rates(worse.trainer, better.trainer)
            assert worse.trainer.train()["epoch"] == 2


def is_same_but_for_rates(one: TFTrainer, other: TFTrainer) -> bool:
    states = one.state_dict(), other.state_dict()
    return not largest_difference(*states) and states[0]["epoch"] == states[1]["epoch"]


def test_rates_that_differ() -> None:
    assert differing_rates([0.1, 0.2, None], [0.1, 0.3, None]) == [None, 0.3, None]
    assert differing_rates([0.1], [0.1]) == []
    assert differing_rates([], [0.1]) == [0.1]
