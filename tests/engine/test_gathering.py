from __future__ import annotations

import pytest

from raysgd.engine.gathering import grace_s


@pytest.mark.parametrize("asks_survivors", [True, False])
def test_a_death_explains_everything_and_is_not_waited_after_for_long(asks_survivors: bool) -> None:
    shortest = grace_s({"died"}, asks_survivors)
    for kinds in ({"died", "user"}, {"died", "disconnected"}):
        assert grace_s(kinds, asks_survivors) == shortest
    for kinds in ({"user"}, {"disconnected"}, {"user", "disconnected"}):
        assert grace_s(kinds, asks_survivors) > shortest


def test_a_lost_connection_needs_no_explanation_where_survivors_are_asked_next() -> None:
    assert grace_s({"disconnected"}, asks_survivors=True) < grace_s({"disconnected"}, asks_survivors=False)
    assert grace_s({"user"}, asks_survivors=True) == grace_s({"user"}, asks_survivors=False)
