"""The containers that `register` is given things in."""

from __future__ import annotations

import pytest

from raysgd.worker.parts import RegisteredParts, refuse_unknown


@pytest.mark.parametrize(("container", "mirrored"), [(None, 3), (list, [3]), (tuple, (3,))])
def test_what_is_made_of_the_parts_comes_back_in_their_container(container: type | None, mirrored: object) -> None:
    assert RegisteredParts([1], container).mirror([3]) == mirrored


def test_unknown_keywords_are_named() -> None:
    refuse_unknown({}, "", "models")
    with pytest.raises(TypeError, match=r"does not know `a`, `b`. Loaders elsewhere. Allowed are models."):
        refuse_unknown({"a": 1, "b": 2}, "Loaders elsewhere. ", "models")
