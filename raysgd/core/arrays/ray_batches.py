"""Training data from Ray Data datasets: Ray sends batches to the workers one by one.

Every row is in one batch of one worker. With `preserve_order`, batches are sent in row order, and the batches of a step
contain the same rows as a step of a single process with a larger batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raysgd.core.arguments import check_count
from raysgd.core.arrays.ray_data import is_of_ray, with_own_options
from raysgd.core.config_keys import BATCH_SIZE, PLAIN_BATCH_SIZE
from raysgd.core.engine.shared.types import World

Columns = str | Sequence[str] | None


@dataclass(frozen=True)
class BatchForm:
    """The settings of a `RayBatches` that say how rows become batches. The docstring of `RayBatches` explains them."""

    batch_size: int | None
    feature_columns: Columns
    label_column: Columns
    transform: Callable[[Any], Any] | None
    prefetch_batches: int

    @property
    def columns(self) -> list[str] | None:
        """Names of the feature and label columns to use. None to use all columns."""
        if self.feature_columns is None:
            return None
        return [*_listed(self.feature_columns), *_listed(self.label_column)]


def _listed(columns: Columns) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns or ())


PLAIN_FORM = BatchForm(None, None, None, None, 1)
"""The form of batches that contain the columns or arrays unchanged."""


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
        return BatchForm(
            self.batch_size, self.feature_columns, self.label_column, self.transform, self.prefetch_batches
        )

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
        return [RayShare(iterator, self.form) for iterator in iterators]

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
    """

    iterator: Any
    form: BatchForm

    def arrays(self) -> Iterator[Mapping[str, Any]]:
        """Yield the batches of one pass as dicts of NumPy arrays."""
        form = self.form
        yield from self.iterator.iter_batches(
            batch_size=form.batch_size, batch_format="numpy", prefetch_batches=form.prefetch_batches
        )


Convert = Callable[[Mapping[str, Any], BatchForm], Any]
"""Converts a dict of arrays into a batch of the framework."""


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
        form = self.batches.form
        return (self._convert(arrays, form) for arrays in RayShare(self.iterator, form).arrays())

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
