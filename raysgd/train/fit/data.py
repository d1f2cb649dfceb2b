"""Provides each worker's data in a run of `fit()`: its shard of each sharded dataset, and all other datasets in full.

Before anything runs, `merged_config` merges the user's config with the default config of the trainer's class.
`prepared` then calls functions that return datasets and applies the preprocessor, once per run. `DatasetShards` shards
the datasets whenever workers start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raysgd.air.config import DatasetConfig
from raysgd.air.constants import TRAIN_DATASET_KEY, WILDCARD_KEY
from raysgd.core.arrays.user_data import are_cpus_free, is_of_ray, with_own_options
from raysgd.streams.stream import Stream
from raysgd.train._worker.shards import DividedData, divided

OWN_CONFIG: Mapping[str, DatasetConfig] = {
    TRAIN_DATASET_KEY: DatasetConfig(fit=True, split=True),
    WILDCARD_KEY: DatasetConfig(split=False),
}
"""The default config: the dataset "train" is sharded, and every worker gets the other datasets in full.

The preprocessor is fit on "train".
"""


class DataConfig:
    """Selects the datasets to shard across the workers, and sets how Ray Data reads them.

    Derive from this class and override `configure` to shard datasets differently.

    Args:
        datasets_to_split: Names of the datasets to shard; "all" for all datasets. Every worker gets all rows of each
            dataset that is not sharded.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or a dict of such options by dataset name. None
            leaves the options of each dataset unchanged.
        enable_shard_locality: True to prefer blocks that are already on a worker's node.

    Raises:
        TypeError: `datasets_to_split` is neither "all" nor a list of names.
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,
    ) -> None:
        if datasets_to_split != "all" and not (
            isinstance(datasets_to_split, list) and all(isinstance(name, str) for name in datasets_to_split)
        ):
            raise TypeError(
                f'`datasets_to_split={datasets_to_split!r}`: need "all", or a list of names of datasets, such as '
                '["train"].'
            )
        self._datasets_to_split = datasets_to_split
        self._execution_options = execution_options
        self._enable_shard_locality = enable_shard_locality

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return each worker's data, as a list with one dict per rank.

        A dict has, by dataset name, the values that `get_dataset_shard` returns on that worker.

        Called in the driver whenever workers start. The shards of a Ray Data dataset wait for each other at the start
        of each epoch, so restarted workers need new shards.

        Args:
            datasets: The datasets by name.
            world_size: Number of workers.
            worker_handles: Ray actor handles of the workers, by rank; None if unknown.
            worker_node_ids: The workers' nodes, by rank; None if unknown.
            **kwargs: Reserved for later versions.
        """
        hints = worker_node_ids if self._enable_shard_locality else None
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            options = self._execution_options
            options = options.get(name) if isinstance(options, Mapping) else options
            if options is not None and is_of_ray(dataset):
                dataset = with_own_options(dataset)
                dataset.context.execution_options = options
            if not self.splits(name):
                parts = [dataset.iterator() if is_of_ray(dataset) else dataset] * world_size
            elif is_of_ray(dataset):
                parts = dataset.streaming_split(world_size, equal=True, locality_hints=hints)
            else:
                parts = divided(dataset, world_size)
            for shard, part in zip(shards, parts, strict=True):
                shard[name] = part
        return shards

    @staticmethod
    def default_ingest_options() -> Any:
        """Return a copy of the `ray.data.ExecutionOptions` of this process's Ray Data context.

        The copy has the context's resource limits, `preserve_order` and `verbose_progress`, and otherwise the defaults.
        """
        import ray.data

        options = ray.data.DataContext.get_current().execution_options
        return ray.data.ExecutionOptions(
            resource_limits=options.resource_limits,
            preserve_order=options.preserve_order,
            verbose_progress=options.verbose_progress,
        )

    def splits(self, name: str) -> bool:
        """Return True if the dataset with this name is sharded across the workers."""
        return self._datasets_to_split == "all" or name in self._datasets_to_split


class DatasetShards(DividedData):
    """Shards a run's datasets across the workers. It is called whenever workers start, and creates new shards.

    Args:
        datasets: The result of `prepared`.
        config: The result of `merged_config`; None for the default.

    Raises:
        TypeError: The config shards a dataset that cannot be sharded.
    """

    def __init__(self, datasets: Mapping[str, Any], config: Any = None) -> None:
        config = OWN_CONFIG if config is None else config
        if not is_data_config(config):
            config = DataConfig([name for name in datasets if _config_of(name, config).split])
        # None if a `configure` of the user decides which datasets are sharded.
        splits = config.splits if getattr(type(config), "configure", None) is DataConfig.configure else None
        for name, dataset in datasets.items():
            if splits is not None and splits(name) and not is_of_ray(dataset) and not hasattr(dataset, "split"):
                raise TypeError(
                    f"`datasets[{name!r}]` is a `{type(dataset).__name__}`, which cannot be sharded across the "
                    "workers: need a dataset of Ray Data, or something with `split(n, equal=True)`. To give every "
                    "worker all of it, pass `dataset_config=raysgd.train.DataConfig(datasets_to_split=[...])` without "
                    "this name."
                )
        self._datasets, self._splits = dict(datasets), splits
        self._config = config
        self._has_warned = False

    @property
    def goes_to_all(self) -> bool:
        splits = self._splits
        return splits is not None and all(
            isinstance(dataset, Stream) or not splits(name) for name, dataset in self._datasets.items()
        )

    def __call__(self, num_workers: int, workers: Sequence[Any] = ()) -> list[Any]:
        """Return each worker's data by rank.

        Args:
            num_workers: Number of workers.
            workers: The workers by rank, as `raysgd.train.worker_group.Worker` objects.

        Raises:
            ValueError: The user's `configure` returned data for a different number of workers.
        """
        if not self._has_warned and any(map(is_of_ray, self._datasets.values())):
            self._has_warned = not are_cpus_free()
        handles = [worker.actor.ray_actor for worker in workers] or None
        nodes = [worker.metadata.node_id for worker in workers] or None
        parts = self._config.configure(dict(self._datasets), num_workers, handles, nodes)
        if len(parts) != num_workers:
            raise ValueError(
                f"`{type(self._config).__name__}.configure` returned {len(parts)} dicts for {num_workers} workers: "
                "return one for each."
            )
        return list(parts)


def check_datasets(datasets: Any) -> dict[str, Any]:
    """Check the `datasets` that a user passed to a trainer, and return them without entries that are None.

    Raises:
        ValueError: `datasets` is neither None nor a dict of datasets by name.
    """
    if datasets is None:
        return {}
    if not isinstance(datasets, Mapping):
        raise ValueError(f"`datasets` is a `{type(datasets).__name__}`: need a dict of datasets by name.")
    for name, dataset in datasets.items():
        if not isinstance(name, str) or isinstance(dataset, str | bytes | int | float | type):
            raise ValueError(f"`datasets[{name!r}]={dataset!r}`: need a dataset under a name.")
    return {name: dataset for name, dataset in datasets.items() if dataset is not None}


def check_preprocessor(preprocessor: Any) -> Any:
    """Check a preprocessor, which may be None, and return it.

    Raises:
        ValueError: `preprocessor` has no `fit` and `transform` methods.
    """
    if preprocessor is not None and not (hasattr(preprocessor, "fit") and hasattr(preprocessor, "transform")):
        raise ValueError(
            f"`preprocessor={preprocessor!r}`: need a preprocessor of `ray.data.preprocessors`, or something else "
            "with `fit(dataset)` and `transform(dataset)`."
        )
    return preprocessor


def merged_config(
    dataset_config: Any, datasets: Mapping[str, Any], own: Mapping[str, DatasetConfig] = OWN_CONFIG
) -> Any:
    """Return the config that decides how datasets are sharded.

    A `DataConfig` from the user is returned unchanged. A dict of `DatasetConfig` is merged into the default config of
    the trainer's class.

    Args:
        dataset_config: The user's config; None for the trainer's default.
        datasets: The datasets by name.
        own: The default config of the trainer's class.

    Raises:
        ValueError: `dataset_config` has another type, or does not match the datasets.
    """
    if is_data_config(dataset_config):
        return dataset_config
    if dataset_config is not None and not isinstance(dataset_config, Mapping):
        raise ValueError(
            f"`dataset_config={dataset_config!r}`: need a `raysgd.train.DataConfig`, or a dict of "
            "`raysgd.air.DatasetConfig` by the names of datasets."
        )
    merged = DatasetConfig.merge(own, dataset_config)
    DatasetConfig.validated(merged, datasets)
    return merged


def is_data_config(config: Any) -> bool:
    """Return True for a `DataConfig` of raysgd or of Ray Train."""
    return callable(getattr(config, "configure", None)) and not isinstance(config, Mapping)


def prepared(datasets: Mapping[str, Any], preprocessor: Any = None, config: Any = None) -> dict[str, Any]:
    """Create the datasets that a run's workers read: call dataset functions, and apply the preprocessor.

    Datasets for which the config requests it are also shuffled. Call this function once per run. After a failure, the
    workers read the same datasets again. A preprocessor that has not been fit yet is fit here, in place.

    Args:
        datasets: Datasets by name, or functions without arguments that return a dataset.
        preprocessor: An object with `fit(dataset)` and `transform(dataset)`, or None.
        config: The result of `merged_config`; None for the default.
    """
    made = {name: each if hasattr(each, "split") or not callable(each) else each() for name, each in datasets.items()}
    configs = OWN_CONFIG if config is None or is_data_config(config) else config
    by_name = {name: _config_of(name, configs) for name in made}
    if preprocessor is not None:
        to_fit = next((name for name in made if by_name[name].fit), None)
        if to_fit is not None and _lacks_fit(preprocessor):
            preprocessor.fit(made[to_fit])
        made = {
            name: dataset if by_name[name].transform is False else preprocessor.transform(dataset)
            for name, dataset in made.items()
        }
    return {name: _shuffled(dataset, by_name[name]) for name, dataset in made.items()}


def _config_of(name: str, configs: Mapping[str, DatasetConfig]) -> DatasetConfig:
    return configs.get(name) or configs.get(WILDCARD_KEY) or DatasetConfig()


def _lacks_fit(preprocessor: Any) -> bool:
    status = getattr(preprocessor, "fit_status", None)
    return status is None or str(getattr(status(), "value", status())) in ("NOT_FITTED", "PARTIALLY_FITTED")


def _shuffled(dataset: Any, config: DatasetConfig) -> Any:
    """Shuffle the rows or blocks of a dataset if the config requests it. Otherwise, return the dataset unchanged."""
    if config.global_shuffle:
        return dataset.random_shuffle()
    if config.randomize_block_order and is_of_ray(dataset):
        return dataset.randomize_block_order()
    return dataset
