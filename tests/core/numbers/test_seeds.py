from __future__ import annotations

from raysgd.core.numbers.seeds import digest, seed_of


def test_seeds_are_the_same_everywhere_and_fit_a_signed_integer() -> None:
    assert digest("1/2/3") == digest(1, 2, 3) == 7503343373756962847
    assert seed_of(1, 2, 3) == digest(1, 2, 3) >> 1 < 2**63


def test_seeds_differ_when_any_part_does() -> None:
    assert len({seed_of(*parts) for parts in ((0, 1), (1, 0), (0, 2), (0, 1, 0))}) == 4
