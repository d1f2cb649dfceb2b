"""Programs are drawn by seeds, and are read as they are printed; one process without the library runs each of them."""

from __future__ import annotations

import pytest
import torch

from raysgd.exceptions import UnevenStepsError, WorkerError, WorkersLostError
from raysgd.torch.parallel.leg import Leg
from tests.programs.grammar import Value, drawn, read, smaller, written
from tests.programs.kinds import KINDS, kind_of
from tests.programs.outcomes import Outcome, differences
from tests.programs.running import EQUAL, REFUSED, WRONG, Runner, Sums, Verdict, is_refusal

NUM_SEEDS = 200
HERE = [kind for kind in KINDS if kind != "lightning"]
"""Lightning, which the other one imports, sets variables of the environment."""


@pytest.mark.parametrize("kind_name", HERE)
def test_a_seed_always_draws_the_same_words_which_can_be_read(kind_name: str) -> None:
    kind = kind_of(kind_name)
    values: dict[str, set[Value]] = {}
    for seed in range(NUM_SEEDS):
        words = drawn(kind.name, kind.choices, kind.core, seed)
        assert words == drawn(kind.name, kind.choices, kind.core, seed)
        assert read(written(words, kind.choices), kind.choices) == words
        assert (words["kill"] != "no") == bool(seed % 2)
        for name, value in words.items():
            values.setdefault(name, set()).add(value)
    assert values["workers"] == {1, 2, 3}
    assert {name: values[name] for name in kind.choices} == {name: {*each} for name, each in kind.choices.items()}


@pytest.mark.parametrize("kind_name", HERE)
def test_words_that_are_settled_stay_so(kind_name: str) -> None:
    kind = kind_of(kind_name)
    for seed in range(NUM_SEEDS):
        words = kind.settled(drawn(kind.name, kind.choices, kind.core, seed))
        assert kind.settled(words) == words
        assert all(kind.settled(each) for each in smaller(words, kind.choices))


@pytest.mark.filterwarnings("ignore:Detected call of")  # of schedulers that begin again with another rate
@pytest.mark.parametrize("kind_name", ["counts", "schedulers", "metrics"])
def test_one_process_runs_them(kind_name: str) -> None:
    runner = Runner(kind_name)
    for seed in range(20):
        outcome = runner.kind.plain(runner.words_of(seed))
        assert all(bool(torch.isfinite(weights).all()) for weights in outcome.weights)


def test_what_differs_is_found() -> None:
    expected = Outcome([{"loss": 1.0, "name": "a"}], [torch.tensor([1.0, 2.0])])
    assert (
        differences(expected, Outcome([{"loss": 1.0 + 1e-9, "name": "a", "more": 3}], [torch.tensor([1.0, 2.0])])) == []
    )
    assert differences(expected, Outcome([{"name": "b"}], [torch.tensor([1.0, 2.1])])) == [
        "row 0: loss is None for 1.0",
        "row 0: name is 'b' for 'a'",
        "model 0 is 0.05 apart: 2.0999999046325684 for 2.0",
    ]


def test_a_program_on_one_worker_is_equal() -> None:
    assert Runner("counts").run("rows=22 batch=4 accumulate=2").word == EQUAL


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("`x=1`"), True),
        (UnevenStepsError("rank 1"), True),
        (RuntimeError("shapes"), False),
        (WorkersLostError("all"), False),
        (WorkerError("RuntimeError"), False),
    ],
)
def test_what_the_library_does_not_do_is_told_from_faults(error: Exception, expected: bool) -> None:
    assert is_refusal(error) == expected


def test_a_library_with_other_weights_is_found_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = Leg.add_up
    monkeypatch.setattr(Leg, "add_up", lambda self, *arguments, **options: 1.01 * add_up(self, *arguments, **options))
    runner = Runner("counts")
    verdict = runner.run("rows=22 batch=4 accumulate=2 sampler=turns")
    assert verdict.word == WRONG
    assert "model 0 is" in verdict.reason
    assert runner.smallest("rows=22 batch=4 accumulate=2 sampler=turns").program == "accumulate=2"


def test_too_many_refusals_are_counted() -> None:
    sums = Sums()
    for word in (EQUAL, EQUAL, EQUAL, EQUAL, REFUSED):
        sums.count(Verdict("", word), 1.0)
    assert not sums.are_too_many_refused
    sums.count(Verdict("", REFUSED), 1.0)
    assert sums.are_too_many_refused
    assert Sums.from_json(sums.to_json()) == sums
