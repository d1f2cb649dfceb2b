"""The data that users pass to a call such as `train`: arrays, datasets of Ray Data, and what each worker gets of them.

Ray Data shards its datasets in the driver. ADR 79 explains why the driver does not split arrays and loaders.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from raysgd.core.arguments import check_count, refuse_text
from raysgd.core.arrays import trees
from raysgd.core.config_keys import BATCH_SIZE, PLAIN_BATCH_SIZE
from raysgd.core.engine.shared.types import World

logger = logging.getLogger(__name__)


def is_of_ray(dataset: Any) -> bool:
    """Return True if the object is a Ray Data dataset."""
    return hasattr(dataset, "streaming_split")


def with_own_options(dataset: Any) -> Any:
    """Return a copy of a Ray Data dataset. Changes to the copy's execution options do not affect the user's dataset."""
    import ray

    return ray.get(ray.put(dataset))


def are_cpus_free() -> bool:
    """Return True if the cluster has a free CPU for Ray Data's tasks. Otherwise, log a warning and return False."""
    import ray

    if ray.available_resources().get("CPU", 0) >= 1:
        return True
    logger.warning(
        "the workers hold all CPUs of the cluster, and Ray Data reads and transforms in tasks that need a CPU each, so "
        "these tasks may wait forever. Use fewer workers, give each fewer CPUs, or add nodes"
    )
    return False


Columns = str | Sequence[str] | None


@dataclass(frozen=True)
class BatchForm:
    """The settings of a `RayBatches` that say how rows become batches. The docstring of `RayBatches` explains them.

    By default, batches have the columns or arrays unchanged.
    """

    feature_columns: Columns = None
    label_column: Columns = None
    transform: Callable[[Any], Any] | None = None

    @property
    def columns(self) -> list[str] | None:
        """Names of the feature and label columns to use. None to use all columns."""
        if self.feature_columns is None:
            return None
        return [*_listed(self.feature_columns), *_listed(self.label_column)]


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns or ())


@dataclass(frozen=True)
class RayBatches:
    """A Ray Data dataset, together with the settings that say how its rows become batches.

    Pass it to `register_data` or to `train(dataset=...)`. To select columns, pass a name for a single column, or a list
    of names for one array with these columns.

    Args:
        dataset: The Ray Data dataset.
        batch_size: Number of rows in one worker's batch. Default: `BATCH_SIZE` in the config divided by the number of
            workers or, if it is not set, "batch_size" in the config.
        feature_columns: Columns to pass to the model. Requires `label_column`. If neither is set, a batch is a dict of
            all columns.
        label_column: The column that the model predicts. A batch is then a tuple of features and label.
        transform: Called with each batch in the worker. Returns the batch that `train_batch` gets.
        preserve_order: True to preserve the dataset's row order. With False, Ray Data may be faster.
        prefetch_batches: Number of batches to prefetch.
        batches_per_block: Number of batches that Ray sends to a worker at a time. With more than one, Ray needs less
            time per row, but a step no longer contains the same rows as a step of a single process.

    Raises:
        TypeError: `dataset` is not a Ray Data dataset.
        ValueError: Another argument is wrong.

    Examples:
        >>> batches = RayBatches(dataset, batch_size=32, feature_columns=["x"], label_column="y")  # doctest: +SKIP
        >>> self.register_data(train_loader=batches)  # doctest: +SKIP
    """

    dataset: Any
    batch_size: int | None = None
    feature_columns: Columns = None
    label_column: Columns = None
    transform: Callable[[Any], Any] | None = None
    preserve_order: bool = True
    prefetch_batches: int = 1
    batches_per_block: int = 1

    def __post_init__(self) -> None:
        if not is_of_ray(self.dataset):
            raise TypeError(f"`RayBatches` got a `{type(self.dataset).__name__}`: need a dataset of Ray Data.")
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, "It is the number of rows in a batch of one worker.")
        check_count("batches_per_block", self.batches_per_block, "It is the number of batches dealt at a time.")
        if (self.feature_columns is None) != (self.label_column is None):
            raise ValueError(
                f"`feature_columns={self.feature_columns!r}` with `label_column={self.label_column!r}`: pass both, or "
                "neither for batches that are dicts of all columns."
            )

    @property
    def form(self) -> BatchForm:
        """The settings that say how rows become batches, without the dataset."""
        return BatchForm(self.feature_columns, self.label_column, self.transform)

    def sized(self, config: Mapping[str, Any]) -> RayBatches:
        """Return a copy that has a batch size. Take the batch size from the config if `batch_size` is not set.

        Args:
            config: The worker config, in which `BATCH_SIZE` is already divided by the number of workers.

        Raises:
            ValueError: There is no batch size.
        """
        if self.batch_size is not None:
            return self
        size = config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE))
        if size is None:
            raise ValueError(
                "A dataset of Ray Data has no batch size. Pass `raysgd.data.RayBatches(dataset, batch_size=...)`, or "
                "put the size of one worker's batch into the trainer's config, `config={\"batch_size\": 32}`."
            )
        return replace(self, batch_size=size)

    def shares(self, num_workers: int) -> list[RayShare]:
        """Split the dataset into one shard per worker, by rank. All workers must read their shards at the same time."""
        if num_workers == 1:
            iterators = [self._ordered(self.dataset).iterator()]
        else:
            iterators = self._ordered(self._in_blocks()).streaming_split(num_workers, equal=False)
        return [self.share(iterator) for iterator in iterators]

    def share(self, iterator: Any) -> RayShare:
        """Return one worker's shard, which Ray Data's iterator over the shard reads."""
        return RayShare(iterator, self.form, self.batch_size, self.prefetch_batches)

    def _in_blocks(self) -> Any:
        """Return the dataset repartitioned into blocks that each contain `batches_per_block` full batches.

        While workers read, Ray sends each block to the worker that has received the fewest rows so far.
        """
        repartition = self.dataset.repartition
        if "strict" not in inspect.signature(repartition).parameters:
            import ray

            raise RuntimeError(
                f"Ray {ray.__version__} cannot shard a dataset so that every worker has whole batches and no row is "
                'lost. Run: pip install --upgrade "ray[data]>=2.55"'
            )
        assert self.batch_size is not None, "`sized` comes first"
        return repartition(target_num_rows_per_block=self.batch_size * self.batches_per_block, strict=True)

    def _ordered(self, dataset: Any) -> Any:
        if not self.preserve_order or dataset.context.execution_options.preserve_order:
            return dataset
        own = with_own_options(dataset)
        own.context.execution_options.preserve_order = True
        return own


@dataclass(frozen=True)
class RayShare:
    """One worker's shard of a `RayBatches`. Each call to `arrays` makes one pass over the shard.

    Args:
        iterator: Ray's iterator over the shard.
        form: The settings that say how rows become batches.
        batch_size: Number of rows in a batch. None if unknown.
        prefetch_batches: Number of batches to read ahead.
    """

    iterator: Any
    form: BatchForm
    batch_size: int | None
    prefetch_batches: int

    def arrays(self) -> Iterator[Mapping[str, Any]]:
        """Yield the batches of one pass as dicts of NumPy arrays."""
        yield from self.iterator.iter_batches(
            batch_size=self.batch_size, batch_format="numpy", prefetch_batches=self.prefetch_batches
        )

    def batches(self, convert: Convert) -> Iterator[Any]:
        """Return an iterator over the batches of the framework that `convert` makes of the arrays."""
        return (convert(arrays, self.form) for arrays in self.arrays())


Convert = Callable[[Any, BatchForm], Any]
"""Converts arrays, such as a dict of columns, into a batch of the framework."""


class RayLoader:
    """The data loader that a worker uses for a Ray Data dataset.

    The driver later assigns the worker's shard to `iterator`.

    Args:
        batches: The dataset that the user's operator registered, with a batch size.
        world: This worker's rank and the number of workers that share the dataset.
        convert: Converts a dict of NumPy arrays into a batch of PyTorch or TensorFlow tensors.

    Attributes:
        iterator: Ray's iterator over this worker's shard. None before the driver has split the dataset.
    """

    def __init__(self, batches: RayBatches, world: World, convert: Convert) -> None:
        self.batches = batches
        self.world = world
        self.iterator: Any = None
        self._convert = convert

    def __iter__(self) -> Iterator[Any]:
        if self.iterator is None:
            self.iterator = self._whole()
        return self.batches.share(self.iterator).batches(self._convert)

    def _whole(self) -> Any:
        if self.world.is_distributed:
            raise RuntimeError(
                "This worker has no shard of the Ray Data dataset yet, because the driver shards the dataset when "
                "`train` or `validate` begins. Iterate over the batches that `train_epoch` and `validate` get."
            )
        return self.batches.shares(1)[0].iterator


def ray_batches(data: Any) -> RayBatches | None:
    """Return `data` as a `RayBatches`, or None if it is not a Ray Data dataset."""
    if isinstance(data, RayBatches):
        return data
    return RayBatches(data) if is_of_ray(data) else None


def ray_batches_of(loaders: Mapping[str, Any]) -> dict[str, RayBatches]:
    """Return the Ray Data datasets that the driver must shard, by loader name, without their transforms.

    Args:
        loaders: The operator's data loaders, by name. Loaders of other data are ignored.
    """
    return {
        name: replace(loader.batches, transform=None)
        for name, loader in loaders.items()
        if isinstance(loader, RayLoader) and loader.world.is_distributed
    }


def chosen(batch: Mapping[str, Any], columns: Columns, join: Callable[[list[Any]], Any]) -> Any:
    """Return the column that `columns` names. For a list of names, join the columns into one array."""
    if isinstance(columns, str):
        return _column(batch, columns)
    return join([_column(batch, name) for name in columns or ()])


def stacked(values: Any) -> Any:
    """Return a column as one NumPy array. If the rows are arrays, stack them."""
    values = np.asarray(values)
    if values.dtype == object and len(values) and isinstance(values[0], np.ndarray):
        return np.stack(list(values))
    return values


def formed(columns: Any, form: BatchForm, join: Callable[[list[Any]], Any]) -> Any:
    """Convert the columns of one batch into the batch that `train_batch` gets.

    Args:
        columns: The framework's arrays, by column name. May be any structure if `form` selects no columns.
        form: The settings that say how columns become a batch.
        join: Joins several columns into one array.
    """
    batch = columns
    if form.feature_columns is not None:
        batch = chosen(columns, form.feature_columns, join)
        batch = batch if form.label_column is None else (batch, chosen(columns, form.label_column, join))
    return batch if form.transform is None else form.transform(batch)


def _column(batch: Mapping[str, Any], name: str) -> Any:
    if name not in batch:
        raise ValueError(f"The dataset has no column {name!r}. Available: {sorted(batch)}.")
    return batch[name]


@dataclass(frozen=True)
class Arrays:
    """A dataset of arrays or a data frame, together with the settings that say how its rows become batches.

    To select columns, pass a name for a single column, or a list of names for one array with these columns.

    Args:
        data: An array or tensor, a tuple or dict of arrays or tensors, or a pandas data frame. Each row is a sample.
        batch_size: Number of rows in one worker's batch. With `split_batches=True`, number of rows in the global batch.
            Default: `BATCH_SIZE` in the config or, if it is not set, "batch_size" in the config. `BATCH_SIZE` counts
            the rows of all workers, so without `split_batches`, it is divided by the number of workers.
        feature_columns: Columns of a dict or data frame to pass to the model.
        label_column: The column that the model predicts. A batch is then a tuple of features and label.
        shuffle: True to shuffle the rows in each pass.
        drop_last: True to skip the last step of a pass if too few rows are left for full batches.
        transform: Called with each batch in the worker. Returns the batch that `train_batch` gets.

    Raises:
        TypeError: `data` or `feature_columns` has another type.
        ValueError: Another argument is wrong.

    Examples:
        >>> import numpy as np
        >>> data = Arrays({"a": np.arange(4.0), "y": np.arange(4)}, feature_columns=["a"], label_column="y")
        >>> data.form.feature_columns
        ['a']
    """

    data: Any
    batch_size: int | None = None
    feature_columns: Columns = None
    label_column: Columns = None
    shuffle: bool = False
    drop_last: bool = False
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not is_frame(self.data) and not is_of_arrays(self.data):
            raise TypeError(
                f"`Arrays` got a `{type(self.data).__name__}`: need an array or tensor, a tuple or dict of them, or a "
                "data frame of pandas."
            )
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, "It is the number of rows in a batch.")
        refuse_text(shuffle=self.shuffle, drop_last=self.drop_last)
        if self.label_column is not None and self.feature_columns is None:
            raise ValueError(
                f"`label_column={self.label_column!r}` without `feature_columns`: name the columns of both."
            )
        check_columns(self.feature_columns, self.data)

    @property
    def form(self) -> BatchForm:
        """The settings that determine how columns become batches, without the data."""
        return BatchForm(self.feature_columns, self.label_column, self.transform)


def is_frame(data: Any) -> bool:
    """Return True if the data is a pandas data frame."""
    return hasattr(data, "iloc") and hasattr(data, "columns")


def check_columns(feature_columns: Any, data: Any) -> None:
    """Raise an error if the user selected columns of data that has no named columns.

    Args:
        feature_columns: The user's selection: a column name, a list of names, or None.
        data: The dataset.

    Raises:
        TypeError: `feature_columns` is neither a name nor a list of names.
        ValueError: The data has no named columns.
    """
    if feature_columns is not None and not isinstance(feature_columns, str | Iterable):
        raise TypeError(f"`feature_columns={feature_columns!r}`: need the name of a column, a list of names, or None.")
    if feature_columns is not None and not (is_frame(data) or isinstance(data, Mapping)):
        raise ValueError(
            f"`feature_columns={feature_columns!r}` with a `{type(data).__name__}`, which has no named columns: pass a "
            "dict or a data frame, or omit `feature_columns`."
        )


def is_of_arrays(data: Any) -> bool:
    """Return True for an array or tensor, or a tuple or dict of arrays or tensors, which may be nested.

    An empty tuple or dict does not count.
    """
    if isinstance(data, tuple):
        return bool(data) and all(map(is_of_arrays, data))
    if isinstance(data, Mapping):
        return bool(data) and all(map(is_of_arrays, data.values()))
    return _is_array(data)


def _is_array(data: Any) -> bool:
    return hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__getitem__") and not is_frame(data)


def as_arrays(data: Any, in_columns: bool = False) -> Any:
    """Convert a dataset to arrays that can be sliced by rows.

    Args:
        data: An array, a tuple or dict of arrays, or a data frame.
        in_columns: True to convert a data frame to a dict of columns, False to convert it to one array of rows.

    Raises:
        ValueError: A data frame that must become one array has a column that is not numeric.
    """
    if not is_frame(data):
        return trees.mapped(data, lambda leaf: leaf.to_numpy() if hasattr(leaf, "iloc") else leaf)
    if in_columns:
        return {name: data[name].to_numpy() for name in data.columns}
    strange = [name for name in data.columns if data[name].dtype.kind not in "biuf"]
    if strange:
        raise ValueError(
            f"The data frame has non-numeric columns, {strange}. Select the model's input columns with "
            "`feature_columns`, or pass a dict of arrays."
        )
    return data.to_numpy()


Kind = Literal["ray", "shards", "rows", "batches", "creator"]


@dataclass(frozen=True)
class CallData:
    """The data passed to one call, such as `train`. `kind` determines whether a worker gets all of the data or a shard.

    Attributes:
        kind: How the data is sharded, and what `data` contains.

            * "ray": Ray Data shards the dataset. `data` is a `RayBatches` in the driver, and a `RayShare` in a worker.
            * "shards": The dataset shards itself. In the driver, `data` has the methods `set_num_shards(n)` and
              `get_shard(i)`. In a worker, `data` is a shard.

            For all other kinds, every worker gets all of the data, and selects its own shard:

            * "rows": `data` is a function that creates a loader or a dataset of rows.
            * "batches": `data` is a loader, a dataset of batches or a stream.
            * "creator": `data` is the user's creator function, with its arguments.
        data: The data. Its type depends on `kind`.
        place: Position at which the last call with the same data stopped. None to start from the beginning.
    """

    kind: Kind
    data: Any
    place: Mapping[str, Any] | None = None

    @property
    def goes_to_all(self) -> bool:
        """True if every worker gets all of the data."""
        return goes_to_all(self.kind)

    @property
    def keeps_position(self) -> bool:
        """True if workers can reuse their data in the next call. False if the driver must send the data again."""
        return self.kind in ("ray", "creator") or getattr(self.data, "keeps_position", False)

    def shares(self, num_workers: int) -> list[CallData]:
        """Return the `CallData` to send to each worker, by rank.

        It contains the worker's shard. If every worker gets all of the data, all workers get this object itself.
        """
        if self.kind == "ray":
            return [replace(self, data=share) for share in self.data.shares(num_workers)]
        if self.kind == "shards":
            self.data.set_num_shards(num_workers)
            return [replace(self, data=self.data.get_shard(rank)) for rank in range(num_workers)]
        return [self] * num_workers


def kind_of(dataset: Any) -> Kind | None:
    """Return the `CallData.kind` of a dataset that is specific to neither PyTorch nor TensorFlow.

    Return None for other datasets.
    """
    if ray_batches(dataset) is not None:
        return "ray"
    if hasattr(dataset, "set_num_shards") and hasattr(dataset, "get_shard"):
        return "shards"
    if isinstance(dataset, Arrays) or is_frame(dataset) or is_of_arrays(dataset):
        return "rows"
    if callable(dataset) and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        return "creator"
    return None


def goes_to_all(kind: Kind | None) -> bool:
    """Return True for a kind of data that every worker gets as a whole, rather than a shard of it."""
    return kind in ("rows", "batches", "creator")


def call_data_of(dataset: Any, config: Mapping[str, Any]) -> CallData | None:
    """Prepare a dataset for the workers. Return None for a dataset that only a trainer of its framework can prepare.

    Args:
        dataset: The `dataset` argument of the user's call.
        config: The worker config, which may contain the batch size.

    Raises:
        ValueError: The batch size is missing or invalid.
    """
    kind = kind_of(dataset)
    if kind == "ray":
        batches = ray_batches(dataset)
        assert batches is not None, "it is of Ray Data"
        return CallData(kind, batches.sized(config))
    if kind == "creator":
        return CallData(kind, partial(dataset, config, size_in(config)))
    return CallData(kind, dataset) if kind == "shards" else None


def size_in(config: Mapping[str, Any]) -> int | None:
    """Return the batch size in a worker's config, or None if there is none.

    This is the batch size of one worker. With `split_batches=True`, it is the global batch size.

    Args:
        config: The worker config, in which `BATCH_SIZE` is already divided by the number of workers.
    """
    size = config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE))
    return None if size is None else check_count("config['batch_size']", size, "It is the number of rows in a batch.")


def size_of(what: str, own: int | None, config: Mapping[str, Any]) -> int:
    """Return the batch size of a dataset: `own` if the data specifies one, otherwise the result of `size_in(config)`.

    Args:
        what: Description of the data, for the error.
        own: Batch size that the data specifies. None if the data specifies no batch size.
        config: The worker config.

    Raises:
        ValueError: Neither the data nor the config specifies a batch size.
    """
    size = size_in(config) if own is None else own
    if size is None:
        raise ValueError(
            f"`dataset=` got {what}, which has no batch size: pass `raysgd.data.Arrays(data, batch_size=...)` or a "
            "`DataLoader`, or put the size of one worker's batch into the trainer's config, "
            '`config={"batch_size": 32}`.'
        )
    return size


class RepeatedBatches:
    """An iterable over batches that can be iterated several times.

    Each iteration is one pass and recreates the batches.

    Args:
        open_pass: Called at the start of each pass. Returns an iterator over the batches of that pass.
    """

    def __init__(self, open_pass: Callable[[], Iterator[Any]]) -> None:
        self._open_pass = open_pass

    def __iter__(self) -> Iterator[Any]:
        return self._open_pass()
