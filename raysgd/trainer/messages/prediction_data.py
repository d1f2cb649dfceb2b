"""Makes batches to predict from arrays, data frames, Ray Data and iterators, independently of the framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from raysgd.core.arguments import did_you_mean, is_integer
from raysgd.core.arrays import trees
from raysgd.core.arrays.arrays import Arrays, as_arrays, check_columns, is_frame
from raysgd.core.arrays.containers import ArrayContainer, Container, DataFrameContainer, RayDataContainer
from raysgd.core.arrays.data_kinds import kind_of
from raysgd.core.arrays.ray_batches import PLAIN_FORM, BatchForm, Columns, ray_batches
from raysgd.trainer.messages.prediction import Batches, Rows, Work

DEFAULT_BATCH_SIZE = 32


@dataclass
class PredictionSource:
    """Supplies the data of a `predict` call in pieces. A piece is one batch, or the row indices of one batch.

    Attributes:
        pieces: The pieces, in row order.
        work: Function that packs consecutive pieces into a `Work`, the object that is sent to one worker.
        nbytes: Function that returns the number of bytes to send for a piece.
        num_batches: Number of batches in the whole data, or None if unknown.
        share: Data to send once to every worker, such as the dataset to which row indices refer. None if no such data
            is needed.
        has_target: True if tuple batches end with a target, False if not. None to assume a target in tuples with
            several elements.
    """

    pieces: Iterator[Any]
    work: Callable[[Sequence[Any]], Work]
    nbytes: Callable[[Any], int]
    num_batches: int | None
    share: Any = None
    has_target: bool | None = None

    def draw(self, number: int) -> Sequence[Any]:
        """Return the next pieces, at most `number` of them. Return an empty list when no pieces are left."""
        return list(islice(self.pieces, number))

    def close(self) -> None:
        """If the pieces come from a generator, close the generator."""
        if hasattr(self.pieces, "close"):
            self.pieces.close()


def source_of_rows(num_rows: int, batch_size: int, share: Any) -> PredictionSource:
    """Return a source whose pieces are the row indices of batches, in a dataset that every worker receives whole.

    Args:
        num_rows: Number of rows in the dataset.
        batch_size: Number of rows in a batch.
        share: The dataset, in the form that is sent to every worker.
    """
    ranges = [range(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)]
    return PredictionSource(iter(ranges), Rows, lambda piece: 0, len(ranges), share)


def source_of_batches(
    batches: Iterable[Any], num_batches: int | None = None, form: BatchForm | None = None
) -> PredictionSource:
    """Return a source whose pieces are batches from an iterable.

    Args:
        batches: The batches, in row order.
        num_batches: Number of batches, or None if unknown.
        form: How to convert arrays and dicts of columns to batches of the framework. None if the batches need no
            conversion.
    """
    return PredictionSource(iter(batches), partial(Batches, form=form), trees.nbytes, num_batches)


def _rows(array: Any, start: int, stop: int) -> Any:
    part = array[start:stop]
    # Clone a slice of a tensor, because pickling the slice itself would send the whole tensor.
    return part.clone() if hasattr(part, "clone") else part


def num_rows_of(arrays: Any) -> int:
    """Return the number of rows in arrays, which must all have the same number.

    Args:
        arrays: An array, or arrays in tuples, lists and dicts.

    Raises:
        ValueError: The numbers of rows differ, or an array is a scalar.
    """
    num_rows = {name: trees.rows_of(leaf) for name, leaf in trees.leaves(arrays)}
    if len(set(num_rows.values())) != 1 or None in num_rows.values():
        sizes = ", ".join(f"{name or 'it'}: {rows}" for name, rows in num_rows.items())
        raise ValueError(f"The arrays have different numbers of rows, or none ({sizes}): pass arrays of equal length.")
    return next(rows for rows in num_rows.values() if rows is not None)


@dataclass(frozen=True)
class BatchRequest:
    """The user's arguments to `predict` that determine how rows are combined into batches.

    Attributes:
        batch_size: Number of rows in a batch.
        has_size: True if the user passed the batch size to `predict`. It then overrides a batch size that the data
            specifies.
        feature_columns: The `feature_columns` that the user passed to `predict`.
        leaf: Function that converts an array of the results to the user's format.
    """

    batch_size: int
    has_size: bool = False
    feature_columns: Columns = None
    leaf: Callable[[Any], Any] = trees.own

    def size(self, own: int | None) -> int:
        """Return the batch size to use. `own` is the batch size that the data specifies, or None if it has none."""
        return self.batch_size if self.has_size or own is None else own

    def form(self, own: BatchForm = PLAIN_FORM) -> BatchForm:
        """Return which columns the batches have, and how they are converted.

        If the user passed `feature_columns` to `predict`, these columns are used without any transform. Otherwise, the
        form that the data specifies applies. Its label column is kept only if it has a transform, because the transform
        may read the label column.

        Args:
            own: The columns and the conversion that the data specifies.
        """
        if self.feature_columns is not None:
            return replace(PLAIN_FORM, feature_columns=self.feature_columns)
        return own if own.transform is not None else replace(own, label_column=None)


Found = tuple[PredictionSource, Container]


def source_of(data: Any, asked: BatchRequest) -> Found | None:
    """Return the source of batches and the container of the results for arrays, data frames or Ray Data.

    Return None for data of another type.

    Args:
        data: The data that the user passed to `predict`.
        asked: The user's arguments that say how to make batches.

    Raises:
        TypeError, ValueError: The columns are invalid, or the data has no columns.
        KeyError: A data frame lacks one of the columns.
    """
    kind = kind_of(data)
    if kind == "ray":
        batches = ray_batches(data)
        assert batches is not None, "it is of Ray Data"
        [share] = replace(batches, batch_size=asked.size(batches.batch_size)).shares(1)
        return source_of_batches(share.arrays(), form=asked.form(batches.form)), RayDataContainer()
    check_columns(asked.feature_columns, data.data if isinstance(data, Arrays) else data)
    return _of_arrays(data, asked) if kind == "rows" else None


def _of_arrays(rows: Any, asked: BatchRequest) -> Found:
    arrays = rows if isinstance(rows, Arrays) else Arrays(rows)
    data, form = arrays.data, asked.form(arrays.form)
    has_target = arrays is rows and isinstance(data, tuple) and len(data) > 1
    container: Container = ArrayContainer(asked.leaf, is_dict=isinstance(data, Mapping))
    if is_frame(data):
        container = DataFrameContainer(data.index)
        data = data if form.columns is None else _columns_of(data, form.columns)
    rows = as_arrays(data, in_columns=form.columns is not None)
    size = asked.size(arrays.batch_size)
    starts = range(0, num_rows_of(rows), size) or [0]  # without rows, predict one empty batch, which shows the format

    def batch_at(start: int) -> Any:
        return trees.mapped(rows, lambda array: _rows(array, start, start + size))

    source = source_of_batches(map(batch_at, starts), len(starts), form)
    return replace(source, has_target=has_target or form.label_column is not None), container


def _columns_of(frame: Any, columns: Sequence[str]) -> Any:
    for name in columns:
        if name not in frame.columns:
            known = [str(each) for each in frame.columns]
            raise KeyError(
                f"`feature_columns`: the data frame has no column {name!r}.{did_you_mean(str(name), known)} Available: "
                f"{', '.join(known)}."
            )
    return frame[columns]


def refuse(data: Any, kinds: str) -> TypeError:
    """Return the error to raise for data of a type that `predict` does not support.

    Args:
        data: The data.
        kinds: Description of the types that are supported.
    """
    hint = ""
    if isinstance(data, list):
        first = type(data[0]) if data else object
        joined = "torch.stack" if f"{first.__module__}.{first.__name__}" == "torch.Tensor" else "numpy.asarray"
        hint = f" For the rows in a list pass `{joined}(data)`, for the batches in it `iter(data)`."
    elif is_integer(data):
        hint = " Pass the data themselves."
    elif isinstance(data, np.generic):
        hint = " Pass an array with a row for each sample."
    return TypeError(f"`predict` got a `{type(data).__name__}`: need {kinds}.{hint}")
