"""Who gets which data in a `fit`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raysgd.air.config import DatasetConfig
from raysgd.train.fit.data import (
    DataConfig,
    DatasetShards,
    check_datasets,
    merged_config,
    prepared,
)


class Numbers:
    """A dataset that is none of Ray Data."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def split(self, n: int, *, equal: bool) -> list[tuple[int, ...]]:
        assert equal
        return [self.values[rank::n] for rank in range(n)]

    def random_shuffle(self) -> Numbers:
        return Numbers(*reversed(self.values))


class Streamed(Numbers):
    """Behaves as a dataset of Ray Data does, as far as it is divided."""

    def streaming_split(self, n: int, *, equal: bool, locality_hints: Any) -> list[Any]:
        return [(part, locality_hints) for part in self.split(n, equal=equal)]

    def iterator(self) -> str:
        return f"all of {self.values}"

    def randomize_block_order(self) -> Streamed:
        return Streamed(*self.values[::-1])


class Doubling:
    """A preprocessor that has nothing to learn but says what it saw."""

    def __init__(self) -> None:
        self.fit_on: list[Any] = []

    def fit(self, dataset: Numbers) -> Doubling:
        self.fit_on.append(dataset.values)
        return self

    def transform(self, dataset: Numbers) -> Numbers:
        return type(dataset)(*(2 * value for value in dataset.values))

    def fit_status(self) -> str:
        return "FITTED" if self.fit_on else "NOT_FITTED"


@pytest.fixture(autouse=True)
def free_cpus(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many CPUs are free, as Ray would say."""
    free = [4.0]
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": free[0]})
    return free


TWO = {"train": Numbers(1, 2, 3, 4), "val": Numbers(5, 6)}


def values_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: getattr(part, "values", part) for name, part in each.items()} for each in parts]


class TestWhoGetsWhat:
    def test_only_train_is_divided_if_nobody_says_otherwise(self) -> None:
        assert values_of(DatasetShards(TWO)(2)) == [
            {"train": (1, 3), "val": (5, 6)},
            {"train": (2, 4), "val": (5, 6)},
        ]

    @pytest.mark.parametrize(
        ("config", "val"),
        [
            (DataConfig(), [(5,), (6,)]),
            (DataConfig(datasets_to_split=["train"]), [(5, 6), (5, 6)]),
            (DataConfig(datasets_to_split=["val"]), [(5,), (6,)]),
        ],
    )
    def test_a_config_says_which_are_divided(self, config: DataConfig, val: list[tuple[int, ...]]) -> None:
        assert [each["val"] for each in values_of(DatasetShards(TWO, config)(2))] == val

    def test_configs_by_name_say_so_too(self) -> None:
        config = merged_config({"val": DatasetConfig(split=True), "train": DatasetConfig(split=False)}, TWO)
        assert values_of(DatasetShards(TWO, config)(2)) == [
            {"train": (1, 2, 3, 4), "val": (5,)},
            {"train": (1, 2, 3, 4), "val": (6,)},
        ]

    def test_ray_data_streams_to_workers_with_regard_to_where_they_are(self) -> None:
        workers = [
            SimpleNamespace(actor=SimpleNamespace(ray_actor=name), metadata=SimpleNamespace(node_id=node))
            for name, node in (("a", "here"), ("b", "there"))
        ]
        datasets = {"train": Streamed(1, 2), "val": Streamed(3)}
        shards = DatasetShards(datasets)
        assert shards(2, workers) == [
            {"train": ((1,), ["here", "there"]), "val": "all of (3,)"},
            {"train": ((2,), ["here", "there"]), "val": "all of (3,)"},
        ]
        config = DataConfig(["train"], enable_shard_locality=False)
        assert DatasetShards(datasets, config)(2, workers)[0]["train"] == ((1,), None)

    def test_shards_are_made_anew_for_each_start(self) -> None:
        shards = DatasetShards(TWO)
        first, again, alone = shards(2), shards(2), shards(1)
        assert first == again
        assert first[0] is not again[0]
        assert alone == [{"train": (1, 2, 3, 4), "val": TWO["val"]}]

    def test_a_config_of_ones_own_divides_as_it_likes(self) -> None:
        assert merged_config(config := DataConfig(), TWO) is config

        class All(DataConfig):
            def configure(
                self, datasets: Any, world_size: int, worker_handles: Any, worker_node_ids: Any, **kwargs: Any
            ) -> list[dict[str, Any]]:
                return [{name: (rank, data.values) for name, data in datasets.items()} for rank in range(world_size)]

        assert DatasetShards(TWO, All())(2)[1] == {"train": (1, (1, 2, 3, 4)), "val": (1, (5, 6))}

        class TooFew(DataConfig):
            def configure(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
                return [{}]

        with pytest.raises(ValueError, match=r"`TooFew.configure` returned 1 dicts for 2 workers"):
            DatasetShards(TWO, TooFew())(2)

    def test_workers_that_hold_all_cpus_are_mentioned_once(
        self, free_cpus: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        shards = DatasetShards({"train": Streamed(1, 2)})
        shards(2)
        assert not caplog.records
        free_cpus[0] = 0.5
        shards(2)
        shards(2)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Ray Data reads and transforms in tasks that need a CPU" in caplog.text
        DatasetShards(TWO)(2)
        assert len(caplog.records) == 1


class TestBadInput:
    def test_what_cannot_be_divided_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"`datasets\['train'\]` is a `list`, which cannot be sharded"):
            DatasetShards({"train": [1, 2]})
        assert DatasetShards({"train": [1, 2]}, DataConfig([]))(2) == [{"train": [1, 2]}] * 2

    @pytest.mark.parametrize("given", ["train", "some", ("train",), [1], None])
    def test_datasets_to_split_is_a_list_of_names(self, given: Any) -> None:
        with pytest.raises(TypeError, match=r"`datasets_to_split="):
            DataConfig(datasets_to_split=given)

    def test_configs_by_name_are_checked(self) -> None:
        with pytest.raises(ValueError, match="`dataset_config` has `fit=True` for"):
            merged_config({"val": DatasetConfig(fit=True)}, TWO)

    @pytest.mark.parametrize("given", [[1], Numbers(1), {1: Numbers(1)}, {"train": "train.csv"}])
    def test_datasets_come_by_name(self, given: Any) -> None:
        with pytest.raises(ValueError, match="`datasets"):
            check_datasets(given)

    def test_none_stands_for_no_dataset(self) -> None:
        assert check_datasets(None) == {}
        assert list(check_datasets({**TWO, "test": None})) == ["train", "val"]


class TestWhatIsDoneBefore:
    def test_datasets_that_are_made_by_functions_are_made(self) -> None:
        assert prepared({"train": lambda: TWO["train"]}) == {"train": TWO["train"]}

    def test_a_preprocessor_is_fit_once_and_applied_to_all(self) -> None:
        preprocessor = Doubling()
        made = prepared(TWO, preprocessor)
        assert {name: data.values for name, data in made.items()} == {"train": (2, 4, 6, 8), "val": (10, 12)}
        prepared(TWO, preprocessor)
        assert preprocessor.fit_on == [(1, 2, 3, 4)]

    def test_configs_say_what_it_is_fit_on_and_applied_to(self) -> None:
        preprocessor = Doubling()
        given = {"train": DatasetConfig(fit=False, transform=False), "val": DatasetConfig(fit=True)}
        made = prepared(TWO, preprocessor, merged_config(given, TWO))
        assert {name: data.values for name, data in made.items()} == {"train": (1, 2, 3, 4), "val": (10, 12)}
        assert preprocessor.fit_on == [(5, 6)]

    def test_shuffles_only_where_somebody_asked_for_it(self) -> None:
        datasets = {"train": Streamed(1, 2), "val": Numbers(3, 4)}
        given = {"train": DatasetConfig(randomize_block_order=True), "val": DatasetConfig(global_shuffle=True)}
        made = prepared(datasets, config=merged_config(given, datasets))
        assert [data.values for data in made.values()] == [(2, 1), (4, 3)]
        assert prepared(datasets) == datasets
