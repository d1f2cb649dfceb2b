"""What a run can be configured with, and what is refused.

Covers `raysgd.air.config` and `raysgd.air.config`, whose classes users import from `raysgd.air.config`.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import CheckpointConfig, DatasetConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig
from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.resources import DriverView
from raysgd.exceptions import InvalidCountError


class TestScalingConfig:
    @pytest.mark.parametrize(
        ("arguments", "bundle"),
        [
            ({}, {"CPU": 1.0}),
            ({"use_gpu": True}, {"GPU": 1.0}),
            ({"resources_per_worker": {"CPU": 2}}, {"CPU": 2.0}),
            ({"resources_per_worker": {"CPU": 2}, "use_gpu": True}, {"CPU": 2.0, "GPU": 1.0}),
            ({"resources_per_worker": {"GPU": 0.5}, "use_gpu": True}, {"GPU": 0.5}),
            ({"resources_per_worker": {"disk": 3, "CPU": 0}}, {"disk": 3.0}),
            ({"resources_per_worker": {"CPU": 1, "GPU": 0}}, {"CPU": 1.0}),
        ],
    )
    def test_a_worker_gets_what_was_asked(self, arguments: dict[str, Any], bundle: dict[str, float]) -> None:
        assert ScalingConfig(num_workers=2, **arguments).worker_bundle == bundle

    def test_the_parts_of_a_bundle_have_names(self) -> None:
        config = ScalingConfig(num_workers=1, use_gpu=True, resources_per_worker={"CPU": 2, "disk": 1})
        assert (config.num_cpus_per_worker, config.num_gpus_per_worker) == (2, 1)
        assert config.additional_resources_per_worker == {"disk": 1}

    @pytest.mark.parametrize(
        ("config", "total"),
        [
            (ScalingConfig(), {"CPU": 1}),
            (ScalingConfig(num_workers=2), {"CPU": 3}),
            (ScalingConfig(num_workers=2, trainer_resources={"CPU": 0}), {"CPU": 2}),
            (ScalingConfig(num_workers=2, use_gpu=True), {"CPU": 1, "GPU": 2}),
            (ScalingConfig({"disk": 1}, 3, False, {"CPU": 2}), {"disk": 1, "CPU": 6}),
            (ScalingConfig(num_workers=(2, 8)), {"CPU": 3}),
        ],
    )
    def test_a_run_needs_its_workers_and_the_trial(self, config: ScalingConfig, total: dict[str, float]) -> None:
        assert config.total_resources == total

    @pytest.mark.parametrize(
        ("num_workers", "expected", "is_elastic"),
        [(3, (3, 3), False), ((1, 4), (1, 4), True), ([1, 4], (1, 4), True), ((2, 2), (2, 2), False)],
    )
    def test_a_number_of_workers_is_one_or_a_range(
        self, num_workers: Any, expected: tuple[int, int], is_elastic: bool
    ) -> None:
        config = ScalingConfig(num_workers=num_workers)
        assert (config.worker_range, config.is_elastic) == (expected, is_elastic)

    def test_a_run_without_a_number_of_workers_is_refused_when_it_is_needed(self) -> None:
        config = ScalingConfig()
        with pytest.raises(InvalidCountError, match="`num_workers=None`: a run needs"):
            _ = config.worker_range

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"use_gpu": False, "resources_per_worker": {"GPU": 1}}, "pass `use_gpu=True`"),
            ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "`use_gpu=True`.*leave one of them out"),
            ({"use_gpu": "no"}, "use_gpu='no'"),
            ({"resources_per_worker": {"CPU": -1}}, r"resources_per_worker\['CPU'\]=-1"),
            ({"resources_per_worker": [1]}, r"resources_per_worker=\[1\]"),
            ({"trainer_resources": {"CPU": "1"}}, r"trainer_resources\['CPU'\]='1'"),
            ({"trainer_resources": {1: 1}}, "trainer_resources="),
            ({"placement_strategy": "NEAR"}, "placement_strategy='NEAR'.*STRICT_SPREAD"),
            ({"accelerator_type": ""}, "accelerator_type=''"),
            ({"accelerator_type": 100}, "accelerator_type=100"),
            ({"label_selector": [{"a": "b"}]}, "need a dict of labels and values for all workers alike"),
            ({"label_selector": {"a": 1}}, "need a dict of labels"),
            ({"label_selector": {"a": "b"}, "num_workers": (1, 2)}, "resources are counted on all nodes"),
        ],
    )
    def test_what_cannot_be_is_refused(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            ScalingConfig(**{"num_workers": 2, **arguments})

    def test_it_is_checked_again_on_request(self) -> None:
        config = ScalingConfig(num_workers=2)
        config.num_workers = 0
        with pytest.raises(ValueError, match="num_workers=0"):
            config.check()

    def test_equal_ones_need_the_same(self) -> None:
        assert ScalingConfig(num_workers=2) == ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "GPU": 0})
        assert ScalingConfig(num_workers=2) != ScalingConfig(num_workers=3)
        assert ScalingConfig(num_workers=2) != ScalingConfig(num_workers=(2, 3))
        assert ScalingConfig(num_workers=2) != ScalingConfig(num_workers=2, placement_strategy="SPREAD")
        assert ScalingConfig(num_workers=2) != ScalingConfig(num_workers=2, label_selector={"a": "b"})
        assert ScalingConfig(num_workers=2) != 2

    def test_search_spaces_of_tune_are_left_alone(self) -> None:
        from ray import tune

        config = ScalingConfig(
            num_workers=tune.choice([1, 2]),  # type: ignore[arg-type]
            use_gpu={"grid_search": [True, False]},  # type: ignore[arg-type]
            resources_per_worker={"CPU": tune.grid_search([1, 2]), "GPU": tune.uniform(0, 1)},  # type: ignore[dict-item]
        )
        assert config == config  # what it needs is not known yet
        assert config != ScalingConfig(num_workers=1)
        with pytest.raises(InvalidCountError, match="needs a number of workers"):
            _ = config.worker_range

    @pytest.mark.parametrize(
        "config",
        [
            ScalingConfig({"CPU": 0}, 3, False, {"CPU": 2, "disk": 1}),
            ScalingConfig(num_workers=2, use_gpu=True, accelerator_type="A100"),
            ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}, accelerator_type="A100"),
        ],
    )
    def test_a_reservation_of_tune_says_the_same(self, config: ScalingConfig) -> None:
        factory = config.as_placement_group_factory()
        assert factory.required_resources == config.total_resources
        assert ScalingConfig.from_placement_group_factory(factory) == config

    def test_a_reservation_of_a_range_is_for_the_least_workers(self) -> None:
        factory = ScalingConfig(num_workers=(2, 5)).as_placement_group_factory()
        assert factory.bundles == [{"CPU": 1.0}] * 3

    def test_a_reservation_of_different_workers_is_refused(self) -> None:
        from ray.tune import PlacementGroupFactory

        with pytest.raises(ValueError, match="must be equal"):
            ScalingConfig.from_placement_group_factory(PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}, {"CPU": 2}]))


class TestOtherConfigs:
    @pytest.mark.parametrize(
        ("config_class", "arguments"),
        [
            (CheckpointConfig, {"num_to_keep": -1}),
            (CheckpointConfig, {"num_to_keep": "2"}),
            (CheckpointConfig, {"num_to_keep": True}),
            (CheckpointConfig, {"checkpoint_score_order": "best"}),
            (CheckpointConfig, {"checkpoint_score_attribute": 3}),
            (CheckpointConfig, {"checkpoint_frequency": -1}),
            (FailureConfig, {"max_failures": -2}),
            (FailureConfig, {"max_failures": 1.5}),
            (FailureConfig, {"fail_fast": "no"}),
            (FailureConfig, {"fail_fast": True, "max_failures": 1}),
            (FailureConfig, {"fail_fast": "raise", "max_failures": -1}),
            (SyncConfig, {"sync_period": "1"}),
            (SyncConfig, {"sync_timeout": -1}),
            (SyncConfig, {"upload_dir": ""}),
            (RunConfig, {"name": ""}),
            (RunConfig, {"name": ".."}),
            (RunConfig, {"name": 3}),
            (RunConfig, {"name": "a/b"}),
            (RunConfig, {"name": "a\0b"}),
            (RunConfig, {"storage_path": "nope://x"}),
            (RunConfig, {"storage_path": "s3://"}),
            (RunConfig, {"storage_path": ""}),
            (RunConfig, {"storage_path": 3}),
            (RunConfig, {"verbose": "loud"}),
            (RunConfig, {"storage_path": "/a", "local_dir": "/b"}),
            (RunConfig, {"storage_path": "/a", "sync_config": SyncConfig(upload_dir="/b")}),
            (RunConfig, {"failure_config": 3}),
            (RunConfig, {"checkpoint_config": {"num_to_keep": 1}}),
            (RunConfig, {"sync_config": "auto"}),
        ],
    )
    def test_what_cannot_be_is_refused_by_its_name(self, config_class: type[Any], arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"`{next(iter(arguments))}="):
            config_class(**arguments)

    @pytest.mark.parametrize("fail_fast", [True, False, "raise"])
    def test_a_failure_can_end_everything(self, fail_fast: bool | str) -> None:
        assert FailureConfig(fail_fast=fail_fast).fail_fast == fail_fast

    @pytest.mark.parametrize("arguments", [{"callbacks": print}, {"stop": 3}])
    def test_what_is_of_another_kind_is_refused_by_its_name(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match=f"`{next(iter(arguments))}="):
            RunConfig(**arguments)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"storage_path": "/tmp/results"},
            {"local_dir": "/tmp/results"},
            {"local_dir": "/tmp/results", "storage_path": "/tmp/results"},
            {"sync_config": SyncConfig(upload_dir="/tmp/results")},
            {"storage_path": "/tmp/results", "sync_config": SyncConfig(upload_dir="/tmp/results")},
            {"local_dir": "/tmp/other", "sync_config": SyncConfig(upload_dir="/tmp/results")},
        ],
    )
    def test_a_folder_has_three_names(self, arguments: dict[str, Any]) -> None:
        assert RunConfig(**arguments).storage_path == "/tmp/results"

    @pytest.mark.parametrize(
        "config",
        [
            RunConfig("run", local_dir="/tmp/results"),
            RunConfig("run", sync_config=SyncConfig(upload_dir="/tmp/results")),
        ],
    )
    def test_a_copy_may_have_another_folder(self, config: RunConfig) -> None:
        assert replace(config, storage_path=Path("/other")).storage_path == Path("/other")
        assert replace(config, name="next").storage_path == "/tmp/results"

    @pytest.mark.parametrize("config", [ScalingConfig(num_workers=(1, 2)), RunConfig("run"), DatasetConfig(fit=True)])
    def test_configs_can_be_pickled(self, config: Any) -> None:
        assert pickle.loads(pickle.dumps(config)) == config


OWN = {"train": DatasetConfig(fit=True, split=True), "*": DatasetConfig(split=False)}


class TestDatasetConfig:
    def test_what_is_not_set_has_a_default(self) -> None:
        filled = DatasetConfig(split=True).fill_defaults()
        assert filled == DatasetConfig(False, True, False, True, False, 1 << 30, False, True)

    def test_a_user_sets_single_fields(self) -> None:
        merged = DatasetConfig.merge(OWN, {"train": DatasetConfig(split=False), "valid": DatasetConfig(required=True)})
        assert merged == {
            "train": DatasetConfig(fit=True, split=False),
            "*": DatasetConfig(split=False),
            "valid": DatasetConfig(split=False, required=True),
        }
        assert OWN["train"] == DatasetConfig(fit=True, split=True)

    @pytest.mark.parametrize(
        ("own", "given", "words"),
        [
            ({"train": DatasetConfig()}, {"valid": DatasetConfig()}, r"names 'valid'\. Available: \['train'\]"),
            (OWN, {"train": {"split": True}}, r"dataset_config\['train'\]="),
            (OWN, ["train"], r"dataset_config=\['train'\]"),
        ],
    )
    def test_what_cannot_be_merged_is_refused(self, own: Any, given: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            DatasetConfig.merge(own, given)

    @pytest.mark.parametrize(
        ("config", "datasets", "words"),
        [
            ({"a": DatasetConfig(fit=True), "b": DatasetConfig(fit=True)}, "ab", r"`fit=True` for \['a', 'b'\]"),
            ({"a": DatasetConfig(fit=True, transform=False)}, "a", "`transform=False`"),
            ({"a": DatasetConfig(required=True)}, "", r"`datasets` lacks \['a'\]"),
            ({"a": DatasetConfig()}, "ab", r"`datasets` has \['b'\]"),
        ],
    )
    def test_configs_have_to_fit_the_datasets(self, config: Any, datasets: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            DatasetConfig.validated(config, dict.fromkeys(datasets))

    def test_a_wildcard_stands_for_any_dataset(self) -> None:
        validated = DatasetConfig.validated(OWN, {"train": 1, "other": 2})
        assert validated["train"].split
        assert validated["*"] == DatasetConfig().fill_defaults()


class TestGpusOfTheCluster:
    @pytest.fixture(autouse=True)
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray_cluster, "ensure_ray", lambda: None)
        monkeypatch.setattr(
            ray_cluster, "gpus_of_nodes", lambda custom: (2.0,) if "accelerator_type:T4" not in custom else ()
        )

    @pytest.mark.parametrize(
        ("arguments", "bundle"),
        [
            ({"num_workers": 2}, {"GPU": 1.0}),
            ({"num_workers": (1, 3)}, {"GPU": 0.5}),  # the largest number counts
            ({"num_workers": (1, 2), "elastic": True, "spare_workers": 1}, {"GPU": 0.5}),
            ({"num_workers": 3, "resources_per_worker": {"CPU": 2}}, {"CPU": 2.0, "GPU": 0.5}),
            ({"num_workers": 2, "resources_per_worker": {"CPU": 2, "GPU": 2}}, {"CPU": 2.0, "GPU": 2.0}),
            ({"num_workers": 2, "accelerator_type": "T4"}, {"CPU": 1.0, "accelerator_type:T4": 0.001}),
        ],
    )
    def test_auto_becomes_what_there_is(self, arguments: dict[str, Any], bundle: dict[str, float]) -> None:
        config = ScalingConfig(use_gpu="auto", **arguments)
        chosen = config.with_gpus_chosen(DriverView())
        assert chosen.worker_bundle == bundle
        assert chosen.use_gpu is ("GPU" in bundle)
        assert config != chosen
        assert "GPU" not in config.worker_bundle, "nothing is chosen before a run starts"

    def test_too_many_workers_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"9 workers .*has 2 GPU.*at most 8 workers"):
            ScalingConfig(num_workers=9, use_gpu="auto").with_gpus_chosen(DriverView())

    def test_true_and_false_stay(self) -> None:
        for use_gpu in (True, False):
            config = ScalingConfig(num_workers=9, use_gpu=use_gpu)
            assert config.with_gpus_chosen(DriverView()) is config

    def test_auto_with_no_gpu_for_each_worker_is_a_contradiction(self) -> None:
        with pytest.raises(ValueError, match=r"`use_gpu='auto'`.*leave one of them out"):
            ScalingConfig(use_gpu="auto", resources_per_worker={"GPU": 0})
