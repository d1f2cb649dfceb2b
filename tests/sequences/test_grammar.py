"""Sequences are drawn by seeds, and are read as they are printed."""

from __future__ import annotations

import pytest

from tests.sequences.grammar import GROWTH, read
from tests.sequences.kinds import KINDS, subject_class

NUM_SEEDS = 300


@pytest.mark.parametrize("kind", [kind for kind, module in KINDS.items() if module != "keras_trainers"])
def test_a_seed_always_draws_the_same_words_which_can_be_read(kind: str) -> None:
    grammar = subject_class(kind).grammar
    for seed in range(NUM_SEEDS):
        words = grammar.drawn(seed)
        assert words == grammar.drawn(seed)
        assert read(" ".join(map(str, words))) == words


@pytest.mark.parametrize("kind", ["collate", "functions", "detached"])
def test_everything_that_may_happen_does(kind: str) -> None:
    grammar = subject_class(kind).grammar
    names = {word.name for seed in range(NUM_SEEDS) for word in grammar.drawn(seed)}
    assert names == {*grammar.calls, *grammar.moments, GROWTH}
