"""The containers that `register` is given things in."""

from __future__ import annotations

import pytest

from raysgd.worker.operator import RegisteredParts


@pytest.mark.parametrize(("container", "mirrored"), [(None, 3), (list, [3]), (tuple, (3,))])
def test_what_is_made_of_the_parts_comes_back_in_their_container(container: type | None, mirrored: object) -> None:
    assert RegisteredParts([1], container).mirror([3]) == mirrored
