"""Variables of all ranks: sums that go again, means that stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.connections.group import Group
from raysgd.engine.shared.types import World
from raysgd.tf.parallel.shared_variables import merge_statistics, share_first, summed
from tests.tf.alike import TwoAlike


@pytest.fixture
def variables() -> list[Any]:
    import tensorflow as tf

    return [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]


def values(variables: list[Any]) -> list[Any]:
    return [variable.numpy().tolist() for variable in variables]


def test_sums_of_all_ranks_are_there_inside_and_own_values_afterwards(variables: list[Any]) -> None:
    with summed(TwoAlike(), variables):
        assert values(variables) == [[2.0, 4.0], 6]
    assert values(variables) == [[1.0, 2.0], 3]
    with summed(Group(World(0, 1)), variables):
        assert values(variables) == [[1.0, 2.0], 3], "a rank that is alone"


def test_statistics_become_means_and_counters_stay(variables: list[Any]) -> None:
    merge_statistics(TwoAlike(), [SimpleNamespace(non_trainable_weights=variables)])
    assert values(variables) == [[1.0, 2.0], 3]


def test_strings_are_not_shared(variables: list[Any]) -> None:
    import tensorflow as tf

    share_first(TwoAlike(), [*variables, tf.Variable("text")])
    assert values(variables) == [[1.0, 2.0], 3]
