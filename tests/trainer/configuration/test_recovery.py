"""What `Recovery` holds: refused when it is made, by the name of the option."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd import Recovery
from raysgd.exceptions import InvalidCountError


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        *[({"heartbeat_s": value}, ValueError, f"`heartbeat_s={value!r}`") for value in (0, None, "30")],
        *[
            ({name: value}, ValueError, f"`{name}={value!r}`: need a number of seconds, more than 0")
            for name in ("form_timeout_s", "settle_timeout_s")
            for value in (0, None, "30", True)
        ],
        *[
            (
                {"snapshot_every_n_steps": value},
                InvalidCountError,
                f"`snapshot_every_n_steps={value}`: need an integer of at least 1",
            )
            for value in (0, -1, 1.5, True)
        ],
        ({"snapshot_every_s": -1}, ValueError, "`snapshot_every_s=-1`: need a number of seconds"),
        *[({"undo": value}, ValueError, f"`undo={value!r}`: allowed are") for value in ("auto", 1, 0.5)],
        ({"snapshot_every_s": "atuo"}, ValueError, "`snapshot_every_s='atuo'`.* Did you mean `auto`"),
        ({"resize_interval_s": 0}, ValueError, "`resize_interval_s=0`"),
        ({"resize_interval_s": "auto"}, ValueError, "`resize_interval_s='auto'`"),
        ({"in_place": None}, ValueError, "`in_place=None`: allowed are True and False"),
        ({"wait_for_workers": "atuo"}, ValueError, "`wait_for_workers='atuo'`: allowed are \"auto\", True and False"),
    ],
)
def test_a_value_is_refused_by_the_name_of_the_option(options: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        Recovery(**options)


def test_snapshots_can_be_switched_off() -> None:
    assert Recovery(snapshot_every_s=None) == Recovery(snapshot_every_s=None, snapshot_every_n_steps=None)
