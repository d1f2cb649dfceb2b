"""What the trainers accept alike: refused when the settings are made, and kept whole on their way to the workers."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from raysgd import Recovery
from raysgd.exceptions import InvalidCountError
from raysgd.trainer.configuration import BatchOptions, GroupSettings, ReplicaSettings
from raysgd.utils import BATCH_SIZE

GROUP = GroupSettings(num_workers=2, backend="gloo", timeout_s=60.0)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"recovery": "restart"}, TypeError, "`recovery='restart'`: need a `raysgd.Recovery`"),
        ({"min_workers": 3}, InvalidCountError, "`min_workers=3` with `num_workers=2`"),
        ({"spare_workers": -1}, InvalidCountError, "`spare_workers=-1`"),
        ({"timeout_s": 0}, ValueError, "`timeout_s=0`"),
        ({"use_local": "no"}, ValueError, "`use_local='no'`: need True or False"),
        ({"initialization_hook": "hook"}, TypeError, "`initialization_hook='hook'`"),
        ({"num_cpus_per_worker": -1}, ValueError, "`num_cpus_per_worker=-1`"),
    ],
)
def test_a_value_is_refused_when_the_settings_are_made(changes: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        replace(GROUP, **changes)


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, BatchOptions(), False),
        ({BATCH_SIZE: 64}, BatchOptions(), True),
        ({"batch_size": 64}, BatchOptions(), False),
        ({}, BatchOptions(True), True),
        ({}, BatchOptions(deterministic=True, num_shards=4), True),
    ],
)
def test_a_global_batch_that_was_named_does_not_depend_on_the_number_of_workers(
    config: dict[str, int], options: BatchOptions, expected: bool
) -> None:
    assert ReplicaSettings(dict, config, batch_options=options).keeps_global_batch is expected


def test_settings_do_not_change_on_their_way_to_the_workers() -> None:
    settings = ReplicaSettings(dict, {"lr": 1}, use_gpu=True)
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(FrozenInstanceError):
        settings.use_gpu = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("use_local", "num_workers", "expected"), [(True, 1, True), (True, 2, False), (False, 1, False)]
)
def test_a_driver_alone_is_told_from_a_group(use_local: bool, num_workers: int, expected: bool) -> None:
    assert replace(GROUP, use_local=use_local, num_workers=num_workers).is_driver_only is expected


@pytest.mark.parametrize(
    ("changes", "obstacles", "what"),
    [
        ({"num_workers": 1, "use_local": True}, [], "`use_local=True`"),
        ({"recovery": Recovery(in_place=False)}, [], r"`Recovery\(in_place=False\)`"),
        ({}, [(False, "`a`"), (True, "`b`")], "`b`"),
    ],
)
def test_spares_are_refused_where_they_cannot_step_in(
    changes: dict[str, Any], obstacles: list[tuple[bool, str]], what: str
) -> None:
    replace(GROUP, **changes).refuse_spares(obstacles, "gloo")  # there are none
    with pytest.raises(ValueError, match=f"`spare_workers=1` with {what} cannot work: .* Use gloo, or no spares"):
        replace(GROUP, spare_workers=1, **changes).refuse_spares(obstacles, "gloo")


def test_settings_know_those_that_setup_ran_with_and_each_change_since() -> None:
    changed = ReplicaSettings(object, {"a": 3, "b": 1}, config_changes=({"a": 1}, {"a": 2, "b": 0}))
    assert [changed.after(number).config for number in range(4)] == [
        {"a": 1, "b": 0},
        {"a": 2, "b": 0},
        {"a": 3, "b": 1},
        {"a": 3, "b": 1},
    ]
    assert [len(changed.after(number).config_changes) for number in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("revision", "num_changes", "expected"), [(0, 1, True), (0, 2, True), (0, 0, False), (1, 2, False)]
)
def test_operators_follow_later_changes_and_are_made_again_for_others(
    revision: int, num_changes: int, expected: bool
) -> None:
    now = ReplicaSettings(object, {"a": 1}, revision=revision, config_changes=({"a": 0},) * num_changes)
    assert now.follow(ReplicaSettings(object, {"a": 0}, config_changes=({"a": 0},))) == expected
