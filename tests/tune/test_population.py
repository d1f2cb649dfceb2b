"""A population of trainers with one worker each, in this process."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from raysgd import TorchTrainer
from raysgd.tune.population import Exploration, Population, check_space, draw
from tests.torch.operators_for_tests import LinearOperator, equal

RATES = [1e-5, 1e-3, 0.02, 0.05]


ONE_AT_A_TIME = threading.Lock()  # a population makes its trainers in threads, and these share a generator


def make_local(config: dict[str, Any]) -> TorchTrainer:
    with ONE_AT_A_TIME:
        return TorchTrainer(training_operator_cls=LinearOperator, config=config, use_local=True, use_gpu=False, seed=0)


def make_population(space: dict[str, Any], size: int, **options: Any) -> Population:
    return Population(make_local, space, size, seed=0, **options)


@pytest.fixture
def four() -> Iterator[Population]:
    rates = iter(RATES)
    with make_population({"lr": lambda: next(rates)}, 4, exploration=Exploration(resample_probability=0)) as population:
        yield population


def models_of(trainer: Any) -> Any:
    return trainer.state_dict()["models"]


def test_the_worst_copies_the_best_and_goes_on_with_a_config_near_its_own(four: Population) -> None:
    four.train()
    best, worst = four.ranked[0], four.ranked[-1]
    assert (best.config["lr"], worst.config["lr"]) == (0.05, 1e-5)
    trainer = worst.trainer
    [exploit] = four.evolve()
    assert (exploit.index, exploit.source) == (worst.index, best.index)
    assert exploit.config["lr"] == pytest.approx(0.05 * 0.8) or exploit.config["lr"] == pytest.approx(0.05 * 1.2)
    assert worst.trainer is trainer, "nothing was started"
    assert equal(models_of(worst.trainer), models_of(best.trainer))
    assert worst.trainer.config["lr"] == worst.config["lr"] == exploit.config["lr"]
    rate = worst.trainer.get_local_operator().optimizer.param_groups[0]["lr"]
    assert rate == exploit.config["lr"], "of the new config, though the state has another one"
    assert worst.result == best.result


def test_all_train_and_their_history_says_with_which_config(four: Population) -> None:
    best = four.run(num_intervals=2)
    assert [len(member.history) for member in four.members] == [2] * 4
    assert best is four.best
    assert best.result["val_loss"] == min(member.result["val_loss"] for member in four.members)
    assert {entry["config"]["lr"] for member in four.members for entry in member.history[:1]} == set(RATES)
    assert all(entry["epoch"] == 1 for member in four.members for entry in member.history[:1])


def test_a_member_begins_again_with_another_config(four: Population) -> None:
    four.train()
    member = four.members[0]
    four.restart(member, {"lr": 0.01})
    assert (member.config, member.result) == ({"lr": 0.01}, {})
    assert four.ranked[-1] is member, "it has no result yet"
    fresh = make_local({"lr": 0.01})
    try:
        assert equal(models_of(member.trainer), models_of(fresh))
    finally:
        fresh.shutdown()


def test_what_is_no_number_is_the_worst() -> None:
    losses = iter([1.0, math.nan, -1.0])
    with make_population({}, 3, step=lambda trainer: {"val_loss": next(losses)}, mode="max") as population:
        population.train()
        assert [member.result["val_loss"] for member in population.ranked][:2] == [1.0, -1.0]


def test_the_highest_accuracy_is_the_best() -> None:
    shares = iter([0.5, 0.9])
    with make_population({}, 2, step=lambda trainer: {"val_accuracy": next(shares)}, metric="val_accuracy") as found:
        found.train()
        assert found.best.result == {"val_accuracy": 0.9}


def test_an_error_of_one_is_raised_when_all_are_done_and_leaves_the_results_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = [False]

    def step(trainer: TorchTrainer) -> dict[str, Any]:
        number = trainer.config["number"]
        if fails[0] and number == 2:
            raise RuntimeError("no disk is left")
        return {"val_loss": -float(number), "epoch": trainer.train()["epoch"]}

    numbers = iter(range(3))
    with make_population({"number": lambda: next(numbers)}, 3, step=step) as population:
        population.train()
        assert population.best.index == 2
        fails[0] = True
        with pytest.raises(RuntimeError, match="no disk is left") as caught:
            population.train()
        assert "member 2 failed" in caplog.text
        assert "member 2" in str(getattr(caught.value, "__notes__", "member 2"))
        assert [[row["epoch"] for row in member.history] for member in population.members] == [[1, 2], [1, 2], [1]]
        assert [member.index for member in population.ranked] == [1, 0, 2], "it has no result of this interval"


def test_a_result_without_the_metric_says_what_there_is() -> None:
    population = make_population({}, 1, step=lambda trainer: {"loss": 1.0})
    with population, pytest.raises(ValueError, match=r"`metric='val_loss'` is not in the result, which has \['loss'\]"):
        population.train()


def test_when_one_cannot_be_made_the_others_are_shut_down() -> None:
    made: list[TorchTrainer] = []

    def make(config: dict[str, Any]) -> Any:
        if config["number"] == 1:
            return None
        made.append(make_local(config))
        return made[-1]

    numbers = iter(range(2))
    with pytest.raises(TypeError, match="returned a `NoneType`, which has no `train`"):
        Population(make, {"number": lambda: next(numbers)}, 2)
    with pytest.raises(RuntimeError, match="shut down"):
        made[0].train()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": 0}, ValueError),
        ({"mode": "least"}, ValueError),
        ({"quantile": 0.6}, ValueError),
        ({"space": [1]}, TypeError),
        ({"metric": 3}, TypeError),
        ({"metric": ""}, TypeError),
        ({"exploration": 3}, TypeError),
        ({"seed": "x"}, ValueError),
        ({"trainer_factory": None}, TypeError),
        ({"step": 3}, TypeError),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(options: dict[str, Any], error: type[Exception]) -> None:
    [name] = options
    with pytest.raises(error, match=f"{name}="):
        Population(**{"trainer_factory": make_local, "space": {}, "size": 1, **options})


# ---------------------------------------------------- configs that are drawn from a space, and configs near another one

NEVER_AGAIN = Exploration(resample_probability=0)


class Domain:
    """As libraries for hyperparameters have them."""

    lower, upper = 0.5, 2.0

    def sample(self) -> float:
        return 1.0


def test_each_entry_is_drawn_in_its_own_way() -> None:
    space: dict[str, Any] = {
        "choice": [1, 2],
        "called": lambda: 7,
        "domain": Domain(),
        "fixed": "text",
        "deep": {"choice": ["a"]},
    }
    config = draw(space, Random(0))
    assert config["choice"] in (1, 2)
    assert {**config, "choice": 0} == {
        "choice": 0,
        "called": 7,
        "domain": 1.0,
        "fixed": "text",
        "deep": {"choice": "a"},
    }


def test_a_domain_of_ray_tune_is_drawn_from_the_same_random_numbers() -> None:
    tune = pytest.importorskip("ray.tune")
    space = {"lr": tune.loguniform(1e-4, 1e-1)}
    first, again, other = draw(space, Random(1)), draw(space, Random(1)), draw(space, Random(2))
    assert 1e-4 <= first["lr"] <= 1e-1
    assert first == again != other


def test_numbers_are_multiplied_and_stay_within_their_bounds() -> None:
    space = {"free": lambda: 1.0, "bound": Domain()}
    found = [NEVER_AGAIN.changed({"free": 1.0, "bound": 1.9}, space, Random(seed)) for seed in range(20)]
    assert {each["free"] for each in found} == {0.8, 1.2}
    assert {each["bound"] for each in found} == {1.9 * 0.8, 2.0}


def test_choices_move_to_a_neighbor_and_not_past_the_ends() -> None:
    space = {"choice": [1, 2, 4]}
    found = [
        [NEVER_AGAIN.changed({"choice": value}, space, Random(seed))["choice"] for seed in range(20)]
        for value in (1, 2, 4)
    ]
    assert [set(each) for each in found] == [{1, 2}, {1, 4}, {2, 4}]


def test_a_domain_of_ray_tune_is_not_left() -> None:
    tune = pytest.importorskip("ray.tune")
    space = {
        "choice": tune.choice([32, 64]),
        "number": tune.randint(1, 10),
        "logarithmic": tune.lograndint(1, 10),
        "rounded": tune.qrandint(0, 10, 5),
        "from_zero": tune.randint(0, 10),
        "function": tune.sample_from(lambda: 3),
    }
    before = {"choice": 32, "number": 9, "logarithmic": 9, "rounded": 10, "from_zero": 1, "function": 1}
    found = [NEVER_AGAIN.changed(before, space, Random(seed)) for seed in range(20)]
    values = {name: {each[name] for each in found} for name in space}
    integers = {"number": {7, 9}, "logarithmic": {7, 9}, "rounded": {8, 10}, "from_zero": {0, 1}, "function": {1}}
    assert values == {"choice": {32, 64}, **integers}


def test_a_small_integer_does_not_become_zero() -> None:
    found = {NEVER_AGAIN.changed({"layers": 1}, {"layers": lambda: 3}, Random(seed))["layers"] for seed in range(20)}
    assert found == {1}


def test_what_the_space_does_not_name_or_holds_fixed_stays() -> None:
    before = {"other": 1, "fixed": 3, "deep": {"lr": 1.0, "other": 2}}
    space = {"fixed": 3, "deep": {"lr": lambda: 1.0}}
    changed = NEVER_AGAIN.changed(before, space, Random(0))
    assert (changed["other"], changed["fixed"], changed["deep"]["other"]) == (1, 3, 2)
    assert changed["deep"]["lr"] in (0.8, 1.2)
    assert before["deep"]["lr"] == 1.0


def test_an_entry_may_be_drawn_again() -> None:
    space = {"number": lambda: 100.0}
    changed = Exploration(resample_probability=1).changed({"number": 1.0}, space, Random(0))
    assert changed == {"number": 100.0}


@pytest.mark.parametrize("space", [{"lr": []}, {"optimizer": {"lr": ()}}])
def test_a_list_has_choices(space: Any) -> None:
    with pytest.raises(ValueError, match=r"`space` has `'lr': .*`: need at least one choice"):
        check_space(space)


@pytest.mark.parametrize("options", [{"resample_probability": 2}, {"factors": ()}, {"factors": (0.0,)}])
def test_what_cannot_be_of_an_exploration_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Exploration(**options)
