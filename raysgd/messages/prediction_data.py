"""Sources for the batches of a prediction: arrays, frames, Ray Data and iterators, which need no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from raysgd._arguments import did_you_mean, is_integer
from raysgd.arrays import trees
from raysgd.arrays.arrays import Arrays, as_arrays, check_columns, is_frame, is_of_arrays
from raysgd.arrays.containers import ArrayContainer, Container, DataFrameContainer, DictContainer, RayDataContainer
from raysgd.arrays.ray_batches import PLAIN_FORM, BatchForm, Columns, RayBatches, ray_batches
from raysgd.messages.prediction import Batches, Rows, RowSlice, Work

DEFAULT_BATCH_SIZE = 32


class PredictionSource(Protocol):
    """Hands out the batches of a prediction as pieces, which mean something to itself.

    Attributes:
        num_batches: How many there are, if that is known.
        share: What every worker needs once; None if nothing.
        has_target: Whether batches that are tuples end with a target; None: if they have several parts.
    """

    num_batches: int | None
    share: Any
    has_target: bool | None

    def draw(self, number: int) -> Sequence[Any]:
        """The next batches, at most so many; none at the end."""

    def work(self, pieces: Sequence[Any]) -> Work:
        """Consecutive pieces as something that a worker can be sent."""

    def nbytes(self, piece: Any) -> int:
        """Return how many bytes travel for a piece."""

    def close(self) -> None:
        """Lets go of what is open."""


class RowRanges:
    """Rows that are known by their numbers.

    Args:
        num_rows: How many there are.
        batch_size: How many make a batch.
        share: What every worker needs once.
    """

    def __init__(self, num_rows: int, batch_size: int, share: Any = None) -> None:
        self._ranges = [range(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)]
        self._num_drawn = 0
        self.num_batches: int | None = len(self._ranges)
        self.share = share
        self.has_target: bool | None = None

    def draw(self, number: int) -> Sequence[range]:
        """The next batches, at most so many."""
        start, self._num_drawn = self._num_drawn, min(self._num_drawn + number, len(self._ranges))
        return self._ranges[start : self._num_drawn]

    def work(self, pieces: Sequence[range]) -> Work:
        """The numbers of the rows."""
        return Rows(pieces)

    def nbytes(self, piece: range) -> int:
        """Hardly any."""
        return 0

    def close(self) -> None:
        """Nothing is open."""


class ArraySource(RowRanges):
    """Rows of arrays.

    Args:
        arrays: An array, or a tuple or dict of arrays.
        batch_size: Rows in a batch.
        form: Which columns make a batch.
        has_target: Whether the last one of a tuple is a target.

    Raises:
        ValueError: The arrays differ in their number of rows.
    """

    def __init__(self, arrays: Any, batch_size: int, form: BatchForm = PLAIN_FORM, has_target: bool = False) -> None:
        self._arrays, self._form = arrays, form
        num_rows = num_rows_of(arrays)
        super().__init__(num_rows, batch_size)
        if not num_rows:  # the operator alone knows what its predictions look like
            self._ranges, self.num_batches = [range(0)], 1
        self.has_target = has_target
        self._row_bytes = trees.nbytes(arrays) / num_rows if num_rows else 0

    def work(self, pieces: Sequence[range]) -> Work:
        """The rows of these batches."""
        start, stop = (pieces[0].start, pieces[-1].stop) if pieces else (0, 0)
        rows = trees.mapped(self._arrays, lambda array: _rows(array, start, stop))
        return RowSlice(rows, [len(piece) for piece in pieces], self._form)

    def nbytes(self, piece: range) -> int:
        """Of the rows of a batch."""
        return int(len(piece) * self._row_bytes)


def _rows(array: Any, start: int, stop: int) -> Any:
    part = array[start:stop]
    return part.clone() if hasattr(part, "clone") else part  # else the whole tensor would travel


def num_rows_of(arrays: Any) -> int:
    """The number of rows that all arrays have.

    Raises:
        ValueError: They differ, or have none.
    """
    found = {name: trees.rows_of(leaf) for name, leaf in trees.leaves(arrays)}
    if len(set(found.values())) != 1 or None in found.values():
        sizes = ", ".join(f"{name or 'it'}: {rows}" for name, rows in found.items())
        raise ValueError(f"The arrays have different numbers of rows, or none ({sizes}): pass arrays of one length.")
    return next(rows for rows in found.values() if rows is not None)


class BatchSource:
    """Batches as an iterator gives them.

    Args:
        batches: The batches, in the order of their rows.
        num_batches: How many there are, if that is known.
        form: For dicts of columns; None for batches that are ready.
    """

    share = None
    has_target: bool | None = None

    def __init__(self, batches: Iterable[Any], num_batches: int | None = None, form: BatchForm | None = None) -> None:
        self._batches = iter(batches)
        self.num_batches = num_batches
        self._form = form

    def draw(self, number: int) -> Sequence[Any]:
        """The next batches, at most so many."""
        return list(islice(self._batches, number))

    def work(self, pieces: Sequence[Any]) -> Batches:
        """The batches themselves."""
        return Batches(pieces, self._form)

    def nbytes(self, piece: Any) -> int:
        """Of the arrays in a batch."""
        return trees.nbytes(tuple(piece) if isinstance(piece, list) else piece)

    def close(self) -> None:
        """Ends a generator."""
        if isinstance(self._batches, Iterator) and hasattr(self._batches, "close"):
            self._batches.close()


@dataclass(frozen=True)
class BatchRequest:
    """The way in which the rows of some data become batches.

    Attributes:
        batch_size: Rows in a batch, where the data do not say it.
        has_size: Whether `predict` was told the size, so that it counts more than what the data say.
        feature_columns: The columns that `predict` was told.
        leaf: Makes of an array what the user gets.
    """

    batch_size: int
    has_size: bool = False
    feature_columns: Columns = None
    leaf: Callable[[Any], Any] = trees.own

    def size(self, own: int | None) -> int:
        """The size to use for data that say `own` themselves."""
        return self.batch_size if self.has_size or own is None else own

    def form(self, own: BatchForm = PLAIN_FORM) -> BatchForm:
        """The columns to use for data that say `own` themselves. A label is for a transform only."""
        if self.feature_columns is not None:
            return replace(PLAIN_FORM, feature_columns=self.feature_columns)
        return own if own.transform is not None else replace(own, label_column=None)


Found = tuple[PredictionSource, Container]


def source_of(data: Any, asked: BatchRequest) -> Found | None:
    """The source and the container for data of a kind that needs no framework; None for any other.

    Raises:
        TypeError, ValueError: The columns cannot be, or the data have none.
    """
    batches = ray_batches(data)
    if batches is None:
        check_columns(asked.feature_columns, data.data if isinstance(data, Arrays) else data)
    if isinstance(data, Arrays):
        has_target = isinstance(data.data, tuple) and len(data.data) > 1
        return _of_arrays(data.data, asked, asked.size(data.batch_size), asked.form(data.form), has_target)
    if is_frame(data) or is_of_arrays(data):
        return _of_arrays(data, asked, asked.batch_size, asked.form(), has_target=False)
    if batches is None:
        return None
    form = asked.form(batches.form)
    return BatchSource(_batches_of_ray(batches, asked.size(batches.batch_size)), form=form), RayDataContainer()


def _of_arrays(data: Any, asked: BatchRequest, batch_size: int, form: BatchForm, has_target: bool) -> Found:
    container: Container = DictContainer(asked.leaf) if isinstance(data, Mapping) else ArrayContainer(asked.leaf)
    if is_frame(data):
        container, data = (
            DataFrameContainer(data.index),
            data if form.columns is None else _columns_of(data, form.columns),
        )
    arrays = as_arrays(data, in_columns=form.columns is not None)
    return ArraySource(arrays, batch_size, form, has_target or form.label_column is not None), container


def _columns_of(frame: Any, columns: Sequence[str]) -> Any:
    for name in columns:
        if name not in frame.columns:
            known = [str(each) for each in frame.columns]
            raise KeyError(
                f"`feature_columns`: the data frame has no column {name!r}.{did_you_mean(str(name), known)} It has "
                f"{', '.join(known)}."
            )
    return frame[columns]


def _batches_of_ray(batches: RayBatches, batch_size: int) -> Iterator[Any]:
    yield from batches.shares(1)[0].iterator.iter_batches(
        batch_size=batch_size, batch_format="numpy", prefetch_batches=batches.prefetch_batches
    )


def refuse(data: Any, kinds: str) -> TypeError:
    """Return what to raise about data of an unknown kind."""
    hint = ""
    if isinstance(data, list):
        hint = " For the rows in a list pass `numpy.asarray(data)`, for the batches in it `iter(data)`."
    elif is_integer(data):
        hint = " Pass the data themselves."
    elif isinstance(data, np.generic):
        hint = " Pass an array with a row for each sample."
    return TypeError(f"`predict` got a `{type(data).__name__}`: need {kinds}.{hint}")
