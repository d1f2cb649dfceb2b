from __future__ import annotations

import pytest

from raysgd.train._retries import restarts_allowed


@pytest.mark.parametrize(("max_retries", "expected"), [(3, 2), (2, 1), (1, 0), (0, 0), (-1, float("inf"))])
def test_the_last_retry_is_the_one_that_raises(max_retries: int, expected: float) -> None:
    assert restarts_allowed(max_retries) == expected
