"""Prepares arrays and pandas data frames for use as datasets of `train`, `validate` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.arguments import check_count, refuse_text
from raysgd.core.arrays import trees
from raysgd.core.arrays.ray_batches import BatchForm, Columns


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
        return BatchForm(self.batch_size, self.feature_columns, self.label_column, self.transform, 1)


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
