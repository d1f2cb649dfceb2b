"""How much larger a share may get with the memory that is free."""

from __future__ import annotations

import pytest

from raysgd.worker.memory import free_in_node, growth_in_node, largest_growth


@pytest.mark.parametrize(
    ("peak", "free", "expected"),
    [(100, 125, 2.0), (100, 0, 1.0), (100, -5, 1.0), (100, None, 1.0), (0, 100, 1.0)],
)
def test_a_share_may_grow_by_four_fifths_of_what_is_free(peak: int, free: int | None, expected: float) -> None:
    assert largest_growth(peak, free) == pytest.approx(expected)


def test_workers_of_a_node_share_its_memory() -> None:
    alone, shared = free_in_node(1), free_in_node(4)
    assert alone is not None
    assert shared is not None
    assert shared == pytest.approx(alone / 4, rel=0.2)
    assert 1.0 < growth_in_node(4) < growth_in_node(1)
