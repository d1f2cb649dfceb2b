"""What the driver divides: when workers are given shares, and when they have them already."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from raysgd.core.arrays.user_data import CallData, RayBatches
from raysgd.core.engine.shared.types import World
from raysgd.core.sending import SentData
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.driver.shared_data import DataSharing
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.utils import BATCH_SIZE
from tests.core.arrays.rows import Rows


@pytest.fixture(autouse=True)
def free_cpus(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many CPUs are free, as Ray would say."""
    free = [4.0]
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": free[0]})
    return free


TWO, OTHER_TWO, ONE = ([World(rank, size) for rank in range(size)] for size in (2, 2, 1))


def requests(number: int) -> list[tuple[EpochRequest]]:
    return [(EpochRequest(None, {}, False, 0),)] * number


def sharing_with(**config: Any) -> DataSharing:
    return DataSharing(ReplicaSettings(object, config), lambda rank, share: {rank: share})


def shares_of(sharing: DataSharing, batches: RayBatches, worlds: Sequence[World], name: str = "train") -> list[Any]:
    made = sharing.with_registered(requests(len(worlds)), name, batches, worlds)
    return [share[rank].data.iterator.rows for rank, (_, *shares) in enumerate(made) for share in shares]


def test_workers_are_given_shares_once_for_each_group() -> None:
    sharing, batches = sharing_with(), RayBatches(Rows([1, 2, 3]), batch_size=1)
    assert shares_of(sharing, batches, TWO) == [[1, 3], [2]]
    assert shares_of(sharing, batches, TWO) == []
    assert shares_of(sharing, batches, TWO, "validation") == [[1, 3], [2]]
    assert shares_of(sharing, batches, OTHER_TWO) == [[1, 3], [2]]
    assert shares_of(sharing, batches, ONE) == [[1, 2, 3]]


def test_after_a_call_that_failed_they_are_given_new_ones() -> None:
    sharing, batches = sharing_with(), RayBatches(Rows([1, 2]), batch_size=1)
    shares_of(sharing, batches, TWO)
    sharing.forget()
    assert shares_of(sharing, batches, TWO) == [[1], [2]]


def test_workers_that_hold_all_cpus_are_mentioned_once(
    free_cpus: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    sharing, batches = sharing_with(), RayBatches(Rows([1, 2]), batch_size=1)
    free_cpus[0] = 0.0
    shares_of(sharing, batches, TWO)
    shares_of(sharing, batches, OTHER_TWO)
    assert len(caplog.records) == 1
    assert "Ray Data reads and transforms in tasks that need a CPU each" in caplog.text


def given(sharing: DataSharing, dataset: Any, worlds: Sequence[World]) -> tuple[set[str | None], list[Any]]:
    made = sharing.with_data_of_call(requests(len(worlds)), "train", dataset, worlds)
    shares = [share[rank] for rank, (_, *shares) in enumerate(made) for share in shares]
    return {each.shard_key for each, *_ in made}, shares


def test_ray_data_of_a_call_has_the_batch_size_of_the_config() -> None:
    sharing, rows = sharing_with(**{BATCH_SIZE: 4}), Rows([1, 2, 3, 4, 5])
    keys, shares = given(sharing, rows, TWO)
    assert [share.data.iterator.rows for share in shares] == [[1, 2, 5], [3, 4]]
    assert given(sharing, rows, TWO) == (keys, [])
    _, [whole] = given(sharing, rows, ONE)
    assert whole.data.batch_size == 4


def test_functions_that_make_data_are_given_the_config_of_now() -> None:
    sharing = sharing_with(a=1)

    def make(config: Any, batch_size: Any) -> None:
        raise AssertionError("it is called in workers")

    def configs() -> list[Any]:
        return [share.data.args[0] for share in given(sharing, make, ONE)[1]]

    assert (configs(), configs()) == ([{"a": 1}], [])
    sharing.follow(ReplicaSettings(object, {"a": 2}))
    assert configs() == [{"a": 2}]


class Dealt:
    """A dataset of the user's own."""

    def set_num_shards(self, number: int) -> None:
        self.number = number

    def get_shard(self, rank: int) -> str:
        return f"{rank} of {self.number}"


class Endless(Dealt):
    keeps_position = True


def test_a_dataset_of_ones_own_is_divided_in_each_call_unless_it_keeps_its_position() -> None:
    sharing, dataset, endless = sharing_with(), Dealt(), Endless()
    first, again = given(sharing, dataset, TWO), given(sharing, dataset, TWO)
    assert [share.data for share in first[1]] == [share.data for share in again[1]] == ["0 of 2", "1 of 2"]
    assert first[0] != again[0]
    keys, shares = given(sharing, endless, TWO)
    assert [share.data for share in shares] == ["0 of 2", "1 of 2"]
    assert given(sharing, endless, TWO) == (keys, [])
    assert [share.data for share in given(sharing, endless, ONE)[1]] == ["0 of 1"]


def test_a_copy_of_what_a_program_sends_again_stands_for_the_same_data() -> None:
    def place_of(data: Any, sharing: DataSharing) -> Any:
        [(_, share)] = sharing.with_data_of_call(requests(1), "train", data, ONE)
        place: Any = share[0].place
        return place

    first, other = SentData("dataset", [1]), SentData("dataset", [1])
    settings = ReplicaSettings(object, {})
    sharing = DataSharing(settings, lambda rank, share: {rank: share}, lambda data, config: CallData("batches", data))
    begun = pickle.loads(pickle.dumps(first))
    assert place_of(begun, sharing) is None
    sharing.note_position("train", begun, {"consumed": 3})
    validated = pickle.loads(pickle.dumps(replace(other, argument="validation_dataset")))
    again = pickle.loads(pickle.dumps(first))
    assert again is not begun
    assert place_of(again, sharing) == {"consumed": 3}
    assert place_of(validated, sharing) is None
    assert place_of([1], sharing) is None
