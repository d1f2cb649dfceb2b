"""Configs that are drawn from a space, and configs near another one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from raysgd.tune.population import Exploration, check_space, draw

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
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Exploration(**options)
