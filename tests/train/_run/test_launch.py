from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd._state.state_codec import decode
from raysgd.engine.shared.types import World
from raysgd.train._run.launch import Launch
from raysgd.train._run.plugin_hooks import PluginHooks
from raysgd.train._worker.function_replica import FunctionReplicas
from raysgd.train._worker.messages import FunctionSpec
from raysgd.train._worker.shards import DividedData
from raysgd.train.checkpoint import CheckpointManager
from tests.streams.made import MadeStream


class FakeGroup:
    """Shares values by giving them out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.infos = list(range(size))

    def share(self, value: Any) -> list[Any]:
        return [value] * self.size


class FakeHooks:
    """Counts the starts of a function, on a group that runs."""

    def __init__(self, size: int) -> None:
        self.group = FakeGroup(size)
        self.num_starts = 0
        self.num_started, self.num_changes, self.joined = 1, 0, dict[Any, int]()
        self.replicas = FunctionReplicas()
        self.workers = SimpleNamespace(workers=())

    def store(self, value: Any) -> Any:
        return value

    def on_training_start(self) -> None:
        self.num_starts += 1


class Numbers:
    def split(self, n: int, *, equal: bool) -> list[Any]:
        return [range(10)[rank::n] for rank in range(n)]


@pytest.fixture
def checkpoints() -> CheckpointManager:
    made = CheckpointManager()
    made.begin_run(None)
    return made


SPEC = FunctionSpec(int, dict, "score")


def launch(checkpoints: CheckpointManager, size: int = 2, data: Any = None) -> tuple[Launch, FakeHooks]:
    hooks = FakeHooks(size)
    divided = DividedData(data) if data is not None else None
    return Launch(SPEC, checkpoints, divided, cast(PluginHooks, hooks)), hooks


def worlds(size: int) -> list[World]:
    return [World(rank, size) for rank in range(size)]


def test_a_function_is_started_once_on_a_group(checkpoints: CheckpointManager) -> None:
    made, hooks = launch(checkpoints)
    first = worlds(2)
    assert made(first) == [(SPEC, None, None)] * 2
    assert made(first) == [(), ()]
    assert made.members == {0: 0, 1: 0}
    assert hooks.num_starts == 1


def test_others_can_step_in_where_no_part_of_the_data_was_given_away(checkpoints: CheckpointManager) -> None:
    stream = MadeStream([4, 4]).batch(4)
    cases = ((None, True), (stream, True), ({"train": stream}, True), (Numbers(), False))
    for data, can_be_joined in (*cases, ({"train": stream, "other": Numbers()}, False)):
        made, hooks = launch(checkpoints, data=data)
        made.is_elastic = True
        [(spec, *_), _] = made(worlds(2))
        assert spec.has_parts is not can_be_joined
        assert made.can_be_joined is can_be_joined
        assert bool(hooks.replicas.start) is can_be_joined


def test_a_function_is_not_started_again_on_those_that_are_left_of_its_group(checkpoints: CheckpointManager) -> None:
    made, hooks = launch(checkpoints, size=3)
    made(worlds(3))
    hooks.group.infos = [0, 2]
    assert made(worlds(2)) == [(), ()]
    assert made.members == {0: 0, 2: 0}
    assert hooks.num_starts == 1


def test_another_group_is_another_start_even_if_it_looks_the_same(checkpoints: CheckpointManager) -> None:
    made, hooks = launch(checkpoints)
    made(worlds(2))
    hooks.num_started = 2
    assert not made.has_started
    assert made.members == {}
    assert made(worlds(2)) == [(SPEC, None, None)] * 2
    assert hooks.num_starts == 2


def test_a_start_that_fails_is_made_again(checkpoints: CheckpointManager) -> None:
    class Broken(Numbers):
        is_broken = True

        def split(self, n: int, *, equal: bool) -> list[Any]:
            if self.is_broken:
                raise OSError("no such block")
            return super().split(n, equal=equal)

    data, group = Broken(), worlds(2)
    made, _ = launch(checkpoints, data=data)
    with pytest.raises(OSError, match="no such block"):
        made(group)
    data.is_broken = False
    assert [shard for _, _, shard in made(group)] == [range(0, 10, 2), range(1, 10, 2)]


def test_a_function_starts_from_the_newest_checkpoint(checkpoints: CheckpointManager) -> None:
    checkpoints.begin_run(None, {"epoch": 1})
    made, hooks = launch(checkpoints)
    assert [decode(packed, copy=True)["epoch"] for _, packed, _ in made(worlds(2))] == [1, 1]
    checkpoints.add(0, lambda: {"epoch": 2})
    hooks.num_started = 2
    assert [decode(packed, copy=True)["epoch"] for _, packed, _ in made(worlds(2))] == [2, 2]


def test_a_function_whose_reports_nobody_reads_is_started_so(checkpoints: CheckpointManager) -> None:
    made, hooks = launch(checkpoints)
    made(worlds(2))
    made.is_muted, hooks.num_started = True, 2
    assert [spec.is_muted for spec, _, _ in made(worlds(2))] == [True, True]


def test_what_all_ranks_get_alike_is_packed_once(checkpoints: CheckpointManager) -> None:
    first, second = launch(checkpoints)[0](worlds(2))
    assert first is second
