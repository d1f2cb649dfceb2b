"""The data of each worker in a `fit`: a part of what is divided, and all of what is not.

The path of the data of a run: `merged_config` puts the configs of a trainer and of its user together, before anything
runs. `prepared` calls what makes datasets and applies the preprocessor, once. `DatasetShards` divides the datasets, as
often as workers start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raysgd.air.config import DatasetConfig
from raysgd.air.constants import TRAIN_DATASET_KEY, WILDCARD_KEY
from raysgd.arrays.ray_data import are_cpus_free, is_of_ray, with_own_options
from raysgd.streams.stream import Stream
from raysgd.train._worker.shards import DividedData, divided

OWN_CONFIG: Mapping[str, DatasetConfig] = {
    TRAIN_DATASET_KEY: DatasetConfig(fit=True, split=True),
    WILDCARD_KEY: DatasetConfig(split=False),
}
"""What becomes of datasets if no one says otherwise: "train" is divided, every worker gets all of the others."""


class DataConfig:
    """The datasets that are divided over the workers, and how Ray Data reads them.

    Derive from it and override `configure` to divide them in another way.

    Args:
        datasets_to_split: Names of the datasets of which each worker gets a part; "all" for all of them. Every worker
            gets all rows of the others.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or a dict of them by name. None leaves each
            dataset those that it has.
        enable_shard_locality: Whether Ray Data gives a worker blocks that are on its node already, where it can.

    Raises:
        TypeError: `datasets_to_split` is neither "all" nor a list of names.
    """

    def __init__(
        self,
        datasets_to_split: Literal["all"] | list[str] = "all",
        execution_options: Any = None,
        enable_shard_locality: bool = True,
    ) -> None:
        if datasets_to_split != "all" and not _is_list_of_names(datasets_to_split):
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
        """Return what each worker gets, by rank: a dict of what `get_dataset_shard` returns there.

        Called in the driver whenever workers start. The parts of a dataset of Ray Data wait for each other at the
        beginning of each epoch, so workers that start again need new ones.

        Args:
            datasets: The datasets, by name.
            world_size: How many workers there are.
            worker_handles: Ray's handles on their processes, by rank; None if unknown.
            worker_node_ids: The nodes that they are on; None if unknown.
            **kwargs: For later versions.
        """
        hints = worker_node_ids if self._enable_shard_locality else None
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            dataset = with_execution_options(dataset, self._options_of(name))
            for shard, part in zip(shards, self._parts(name, dataset, world_size, hints), strict=True):
                shard[name] = part
        return shards

    @staticmethod
    def default_ingest_options() -> Any:
        """`ray.data.ExecutionOptions` as the context of Ray Data in this process has them."""
        import ray.data

        options = ray.data.DataContext.get_current().execution_options
        return ray.data.ExecutionOptions(
            resource_limits=options.resource_limits,
            preserve_order=options.preserve_order,
            verbose_progress=options.verbose_progress,
        )

    def splits(self, name: str) -> bool:
        """Return whether a dataset is divided."""
        return self._datasets_to_split == "all" or name in self._datasets_to_split

    def _parts(self, name: str, dataset: Any, num_workers: int, hints: list[str] | None) -> list[Any]:
        if self.splits(name):
            return _divided(dataset, num_workers, hints)
        return [dataset.iterator() if is_of_ray(dataset) else dataset] * num_workers

    def _options_of(self, name: str) -> Any:
        given = self._execution_options
        return given.get(name) if isinstance(given, Mapping) else given


class DatasetShards(DividedData):
    """Divides the datasets of a run whenever workers start: makes their parts again at each call.

    Args:
        datasets: What `prepared` returned.
        config: What `merged_config` returned; None for what a trainer does by itself.

    Raises:
        TypeError: A dataset is to be divided and cannot be.
    """

    def __init__(self, datasets: Mapping[str, Any], config: Any = None) -> None:
        config = OWN_CONFIG if config is None else config
        if not is_data_config(config):
            config = DataConfig([name for name in datasets if _config_of(name, config).split])
        if isinstance(config, DataConfig) and type(config).configure is DataConfig.configure:
            for name, dataset in datasets.items():
                _check_can_be_divided(name, dataset, config)
        self._datasets = dict(datasets)
        self._config = config
        self._has_warned = False

    @property
    def is_whole(self) -> bool:
        config = self._config
        if not isinstance(config, DataConfig) or type(config).configure is not DataConfig.configure:
            return False
        return all(isinstance(dataset, Stream) or not config.splits(name) for name, dataset in self._datasets.items())

    def __call__(self, num_workers: int, workers: Sequence[Any] = ()) -> list[Any]:
        """Return what each worker gets, by rank.

        Args:
            num_workers: How many there are.
            workers: The workers, by rank, each a `raysgd.train.worker_group.Worker`.

        Raises:
            ValueError: `configure` of a config of the user's returned something for another number of workers.
        """
        self._warn_if_starved()
        handles = [worker.actor.ray_actor for worker in workers] or None
        nodes = [worker.metadata.node_id for worker in workers] or None
        parts = self._config.configure(dict(self._datasets), num_workers, handles, nodes)
        if len(parts) != num_workers:
            raise ValueError(
                f"`{type(self._config).__name__}.configure` returned {len(parts)} dicts for {num_workers} workers: "
                "return one for each."
            )
        return list(parts)

    def _warn_if_starved(self) -> None:
        if not self._has_warned and any(map(is_of_ray, self._datasets.values())):
            self._has_warned = not are_cpus_free()


def check_datasets(datasets: Any) -> dict[str, Any]:
    """The datasets by name, without those that are None.

    Raises:
        ValueError: It is no dict of datasets by name.
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
    """A preprocessor as it is, or None.

    Raises:
        ValueError: It is not one.
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
    """A `DataConfig` as it is; the config of a trainer with a user's dict of `DatasetConfig` over it.

    Args:
        dataset_config: What the user passed; None leaves the trainer its own.
        datasets: The datasets, by name.
        own: The config of the trainer's class.

    Raises:
        ValueError: It is of another kind, or does not fit the datasets.
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
    """Return whether it is a `DataConfig`, of this library or of Ray Train."""
    return callable(getattr(config, "configure", None)) and not isinstance(config, Mapping)


def prepared(datasets: Mapping[str, Any], preprocessor: Any = None, config: Any = None) -> dict[str, Any]:
    """The datasets ready to be read: made where they are given as functions, transformed, shuffled.

    Call it once for a run: after a failure the workers read the same datasets again. A preprocessor that was not fit
    yet is fit here, in place.

    Args:
        datasets: Datasets, or functions without arguments that return one, by name.
        preprocessor: Has `fit(dataset)` and `transform(dataset)`; None for none.
        config: What `merged_config` returned.
    """
    made = {name: dataset() if _makes_one(dataset) else dataset for name, dataset in datasets.items()}
    configs = OWN_CONFIG if config is None or is_data_config(config) else config
    by_name = {name: _config_of(name, configs) for name in made}
    if preprocessor is not None:
        made = _transformed(made, preprocessor, by_name)
    return {name: _shuffled(dataset, by_name[name]) for name, dataset in made.items()}


def with_execution_options(dataset: Any, options: Any) -> Any:
    """A dataset of Ray Data with these options; the dataset itself keeps its own. Anything else as it is."""
    if options is None or not is_of_ray(dataset):
        return dataset
    own = with_own_options(dataset)
    own.context.execution_options = options
    return own


def _makes_one(dataset: Any) -> bool:
    return callable(dataset) and not hasattr(dataset, "split")


def _config_of(name: str, configs: Mapping[str, DatasetConfig]) -> DatasetConfig:
    return configs.get(name) or configs.get(WILDCARD_KEY) or DatasetConfig()


def _divided(dataset: Any, num_workers: int, hints: list[str] | None) -> list[Any]:
    if is_of_ray(dataset):
        return list(dataset.streaming_split(num_workers, equal=True, locality_hints=hints))
    return divided(dataset, num_workers)


def _check_can_be_divided(name: str, dataset: Any, config: DataConfig) -> None:
    if config.splits(name) and not is_of_ray(dataset) and not hasattr(dataset, "split"):
        raise TypeError(
            f"`datasets[{name!r}]` is a `{type(dataset).__name__}`, which cannot be divided over the workers: need a "
            "dataset of Ray Data, or something with `split(n, equal=True)`. To give every worker all of it, pass "
            "`dataset_config=raysgd.train.DataConfig(datasets_to_split=[...])` without this name."
        )


def _transformed(
    datasets: Mapping[str, Any], preprocessor: Any, configs: Mapping[str, DatasetConfig]
) -> dict[str, Any]:
    filled = {name: config.fill_defaults() for name, config in configs.items()}
    to_fit = next((name for name in datasets if filled[name].fit), None)
    if to_fit is not None and _lacks_fit(preprocessor):
        preprocessor.fit(datasets[to_fit])
    return {
        name: preprocessor.transform(dataset) if filled[name].transform else dataset
        for name, dataset in datasets.items()
    }


def _lacks_fit(preprocessor: Any) -> bool:
    status = getattr(preprocessor, "fit_status", None)
    return status is None or str(getattr(status(), "value", status())) in ("NOT_FITTED", "PARTIALLY_FITTED")


def _shuffled(dataset: Any, config: DatasetConfig) -> Any:
    """Shuffled where somebody asked for it: the default of `randomize_block_order` would hold every stream back."""
    if config.global_shuffle:
        return dataset.random_shuffle()
    if config.randomize_block_order and is_of_ray(dataset):
        return dataset.randomize_block_order()
    return dataset


def _is_list_of_names(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)
