"""What replicas exchange, and the buffer in which gradients travel."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raysgd.backends._mesh import Door
from raysgd.engine.types import World
from raysgd.tf.exchange import Group, Layout

GRADIENTS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32), np.array(2.0, np.float32)]


def test_gradients_come_back_in_their_shapes_times_the_weight() -> None:
    layout = Layout(GRADIENTS)
    buffer = layout.take()
    layout.fill(buffer, GRADIENTS, 0.5)
    assert buffer[-1] == 0.5
    for before, after in zip(GRADIENTS, layout.split(buffer), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert np.array_equal(after, before * 0.5)


def test_every_gradient_begins_where_tensorflow_can_use_it_without_a_copy() -> None:
    layout = Layout(GRADIENTS)
    assert [part.ctypes.data % 64 for part in layout.split(layout.take())] == [0, 0, 0]


def test_what_has_no_weight_may_be_anything() -> None:
    layout = Layout(GRADIENTS)
    buffer = layout.take()
    layout.fill(buffer, [np.full_like(gradient, np.nan) for gradient in GRADIENTS], 0)
    assert not buffer.any()


def test_small_numbers_travel_as_larger_ones_and_large_ones_stay() -> None:
    half = [np.ones(3, np.float16)]
    assert Layout(half).take().dtype == np.float32
    assert Layout(half).split(Layout(half).take())[0].dtype == np.float16
    assert Layout([*half, np.ones(3)]).take().dtype == np.float64


def test_numbers_that_numpy_does_not_know_travel_too() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    gradients = [np.array([1.5, -2.0], ml_dtypes.bfloat16)]
    layout = Layout(gradients)
    buffer = layout.take()
    layout.fill(buffer, gradients, 1.0)
    [back] = layout.split(buffer)
    assert back.dtype == gradients[0].dtype
    assert np.array_equal(back, gradients[0])


def test_a_buffer_is_used_again_only_when_nobody_looks_into_it() -> None:
    layout = Layout(GRADIENTS)
    first = layout.take()
    address = first.ctypes.data
    views = layout.split(first)
    del first
    assert layout.take().ctypes.data != address
    last = views[1][1:3]
    del views
    gc.collect()
    assert layout.take().ctypes.data != address
    del last
    assert layout.take().ctypes.data == address


def test_a_replica_that_is_alone_exchanges_nothing() -> None:
    group, numbers = Group(World(0, 1)), np.arange(3.0)
    group.add_up(numbers)
    group.from_first(numbers)
    assert numbers.tolist() == [0.0, 1.0, 2.0]
    assert group.largest(4.0) == 4.0
    assert group.gather_rows(numbers, [3]).tolist() == [0.0, 1.0, 2.0]


# -------------------------------------------------------------------------------------------- several ranks


@pytest.fixture(params=[2, 3, 4])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    """The groups of some ranks, each to be used in a thread of its own."""
    size = request.param
    doors = [Door("127.0.0.1", 20) for _ in range(size)]
    addresses = [("127.0.0.1", door.port) for door in doors]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: doors[rank].connect(rank, addresses, bytes(16), 1), range(size)))
    yield [Group(World(rank, size), mesh) for rank, [mesh] in enumerate(found)]
    for part in (*doors, *(mesh for [mesh] in found)):
        part.close()


def on_all(groups: list[Group], function: Callable[[Group], Any]) -> list[Any]:
    """What `function` returns on each rank, all at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(function, groups))


def terms(size: int, shape: Any, dtype: Any) -> list[np.ndarray[Any, Any]]:
    """One array for each rank, of numbers whose sum depends on the order in which they are added."""
    generator = np.random.default_rng(7)
    return [np.array(generator.standard_normal(shape) * 10.0 ** (3 * rank), dtype) for rank in range(size)]


@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (1000, 100), (2, 50_001)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_sums_are_those_in_the_order_of_ranks_to_the_bit_on_all_ranks(
    groups: list[Group], shape: Any, dtype: Any
) -> None:
    given = terms(len(groups), shape, dtype)
    expected = functools.reduce(np.add, given)
    for _ in range(2):

        def add_up(group: Group) -> Any:
            numbers = given[group.rank].copy()
            group.add_up(numbers)
            return numbers

        for sums in on_all(groups, add_up):
            assert np.array_equal(sums, expected)


def test_arrays_of_all_ranks_are_gathered(groups: list[Group]) -> None:
    given = terms(len(groups), (2, 3), np.float32)
    for gathered in on_all(groups, lambda group: group.gather(given[group.rank])):
        assert all(np.array_equal(one, other) for one, other in zip(gathered, given, strict=True))
    assert on_all(groups, lambda group: group.largest(float(group.rank))) == [len(groups) - 1.0] * len(groups)
    counts = list(range(len(groups)))
    rows = on_all(groups, lambda group: group.gather_rows(np.full((group.rank, 2), group.rank), counts))
    expected = [[rank] * 2 for rank in counts for _ in range(rank)]
    assert [found.tolist() for found in rows] == [expected] * len(groups)


def test_rank_0_tells_all_others(groups: list[Group]) -> None:
    def told(group: Group) -> Any:
        numbers = np.full((2, 2), group.rank + 5, np.int64)
        group.from_first(numbers)
        return numbers.tolist()

    assert on_all(groups, told) == [[[5, 5], [5, 5]]] * len(groups)


def test_values_travel_from_one_rank_to_some(groups: list[Group]) -> None:
    value = {"name": "a", "weights": [np.arange(6.0).reshape(2, 3), np.array(1), np.zeros((0, 2))]}
    source, takers = len(groups) - 1, list(range(len(groups) - 1))

    def pass_on(group: Group) -> Any:
        if group.rank != source:
            return group.receive(source)
        group.send(value, takers)
        return value

    for found in on_all(groups, pass_on):
        assert found["name"] == "a"
        assert [part.tolist() for part in found["weights"]] == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 1, []]


def test_what_has_gaps_cannot_be_added_up_in_place(groups: list[Group]) -> None:
    with pytest.raises(AssertionError, match="gaps"):
        groups[0].add_up(np.zeros((4, 4))[:, ::2])
