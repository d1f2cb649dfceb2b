"""A `predict` call: batches from the user's data, one round in a worker, and results in the type of the user's data.

In each round, every worker predicts some batches. Results become arrays, the columns of a data frame, or a dataset of
Ray Data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raysgd.core.arguments import did_you_mean, is_integer
from raysgd.core.arrays import trees
from raysgd.core.arrays.user_data import (
    Arrays,
    BatchForm,
    Columns,
    Convert,
    as_arrays,
    check_columns,
    is_frame,
    kind_of,
    ray_batches,
)
from raysgd.trainer.messages.epochs import bind_batch_info

PREDICTION = "prediction"
"""Name under which a container stores a result of `predict_batch` that has no name."""

_BLOCK_BYTES = 2**20


class ArrayContainer:
    """Converts the outputs of batches to the result of one `predict` call, here to arrays, for data that are arrays.

    Args:
        leaf: Function that converts each NumPy array to the type that the user gets.
        is_dict: True to return a dict. An output that is not a dict is then stored under the key "prediction".
    """

    def __init__(self, leaf: Callable[[Any], Any] = trees.own, is_dict: bool = False) -> None:
        self._leaf, self._is_dict = leaf, is_dict

    def stream(self, outputs: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the outputs of each batch, converted to the type that the user gets."""
        return (self._shown(output) for output in outputs)

    def collect(self, outputs: Iterable[Any]) -> Any:
        """Join the outputs of all batches. The result has one row for each row of the data."""
        collected = list(outputs)
        if not collected:
            return self._shown({} if self._is_dict else np.zeros(0, np.float32))
        return self._shown(trees.joined(collected))

    def _shown(self, output: Any) -> Any:
        if self._is_dict and not isinstance(output, Mapping):
            output = {PREDICTION: output}
        return trees.mapped(output, lambda leaf: leaf if isinstance(leaf, list) else self._leaf(leaf))


class DataFrameContainer(ArrayContainer):
    """Returns the outputs of `predict` as columns of a pandas data frame.

    Args:
        index: Index of the data frame passed to `predict`.
    """

    def __init__(self, index: Any) -> None:
        super().__init__(is_dict=True)
        self._index_left = index

    def _shown(self, output: Any) -> Any:
        import pandas as pd

        columns = {name: column for key, leaf in named(output) for name, column in _columns(key, leaf)}
        num_rows = len(next(iter(columns.values()), ()))
        index, self._index_left = self._index_left[:num_rows], self._index_left[num_rows:]
        return pd.DataFrame(columns, index=index)


class RayDataContainer(ArrayContainer):
    """Returns the outputs of `predict` as a Ray Data dataset, in Ray's object store instead of the driver's memory.

    A stream has a dict of arrays for each batch, like Ray Data's `iter_batches`.
    """

    def collect(self, outputs: Iterable[Any]) -> Any:
        """Write the outputs of all batches to Ray's object store and return them as a Ray Data dataset."""
        import ray
        import ray.data

        blocks: list[Any] = [ray.put(_as_frame(trees.joined(group))) for group in _groups(outputs)]
        return ray.data.from_pandas_refs(blocks) if blocks else ray.data.from_items([])

    def _shown(self, output: Any) -> Any:
        return {name: trees.own(leaf) for name, leaf in named(output)}


def named(output: Any) -> Iterator[tuple[str, Any]]:
    """Yield a name and an array for each array in the output of `predict` for one batch.

    Names look like `prediction`, `prediction_0` or `box.x`.
    """
    if isinstance(output, Mapping):
        for key, part in output.items():
            yield from ((_inside(str(key), name), leaf) for name, leaf in named(part))
    elif isinstance(output, tuple):
        names = getattr(output, "_fields", range(len(output)))
        for name, part in zip(names, output, strict=True):
            outer = name if isinstance(name, str) else f"{PREDICTION}_{name}"
            yield from ((_inside(outer, inner), leaf) for inner, leaf in named(part))
    else:
        yield PREDICTION, output


def _inside(outer: str, inner: str) -> str:
    return outer if inner == PREDICTION else f"{outer}.{inner}"


def _columns(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    """Convert an output array to columns of a data frame. Yield the name and values of each column.

    A matrix becomes several columns, one for each of its columns. An array with more dimensions becomes a column of
    objects.
    """
    shape: Sequence[int] = getattr(leaf, "shape", (len(leaf),))
    if len(shape) == 2 and shape[1] > 1:
        yield from ((f"{name}_{index}", leaf[:, index]) for index in range(shape[1]))
    elif len(shape) == 2 and shape[1] == 1:
        yield name, leaf[:, 0]
    else:
        yield name, list(leaf) if len(shape) > 1 else leaf


def _as_frame(output: Any) -> Any:
    """Return the output as a data frame that can be a block of a Ray Data dataset.

    An array with several dimensions becomes a column of arrays, which Ray Data reads as tensors.
    """
    import pandas as pd

    return pd.DataFrame({name: leaf if np.ndim(leaf) < 2 else list(leaf) for name, leaf in named(output)})


def _groups(outputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the batches' outputs in lists, each large enough for one block of a Ray Data dataset."""
    group: list[Any] = []
    num_bytes = 0
    for output in outputs:
        group.append(output)
        num_bytes += trees.nbytes(output)
        if num_bytes >= _BLOCK_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


HAS_TARGET = "has_target"
"""Key in the `batch_info` of `predict_batch`. Its value is True if the last element of a tuple batch is a target."""


@dataclass(frozen=True)
class PredictRequest:
    """The request of the driver to one worker for one round of a `predict` call.

    Attributes:
        key: ID of the `predict` call. Workers store the data of the call under this ID.
        info: The `info` that the user passed to `predict`.
        has_target: True if tuple batches end with a target, False if not. None to assume a target in tuples with
            several elements.
        first_batch: Index of this worker's first batch among all batches of the call.
        num_done: Number of batches that all workers together completed before this round.
        num_workers: Number of workers in this round.
        total: Number of batches in all rounds, or None if unknown.
        is_last: True if this is the last round, after which workers can discard the data of the call.
    """

    key: str
    info: Mapping[str, Any]
    has_target: bool | None
    first_batch: int
    num_done: int
    num_workers: int
    total: int | None
    is_last: bool = False


@dataclass(frozen=True)
class Work:
    """The batches that one worker predicts in one round of a `predict` call.

    Attributes:
        batches: The batches in the format of the user's data, in row order; or the row indices of each batch.
        form: How to convert arrays and dicts of columns to batches of the framework. None if the batches need no
            conversion.
        are_rows: True if `batches` contains ranges of row indices, in a dataset that every worker already has.
    """

    batches: Sequence[Any]
    form: BatchForm | None = None
    are_rows: bool = False

    def made(self, as_batch: Convert, num_rows_of: Callable[[Any], int]) -> Iterator[tuple[Any, int]]:
        """Yield each batch in the framework's format, with its number of rows.

        Args:
            as_batch: Function that converts a batch according to `form`.
            num_rows_of: Function that returns the number of rows in a converted batch.
        """
        for rows in self.batches:
            batch = rows if self.form is None else as_batch(rows, self.form)
            yield batch, num_rows_of(batch)


def outputs_of(
    operator: Any, batches: Iterable[tuple[Any, int]], request: PredictRequest, plain: Callable[..., Any]
) -> Iterator[Any]:
    """Yield the output of the operator's `predict_batch` for each batch, converted to arrays.

    Args:
        operator: Operator whose `predict_batch` is called.
        batches: This worker's batches in this round, each with its number of rows.
        request: The driver's request for this round.
        plain: Function that converts a tensor to an array.

    Raises:
        ValueError: The number of rows in an output differs from that of its batch, or an output is empty.
    """
    predict_batch = bind_batch_info(operator.predict_batch)
    for number, (batch, num_rows) in enumerate(batches):
        has_several = isinstance(batch, tuple | list) and len(batch) > 1
        has_target = has_several if request.has_target is None else request.has_target
        where = {"batch_idx": request.first_batch + number, HAS_TARGET: has_target}
        output = plain_outputs(predict_batch(batch, {**request.info, **where}), plain)
        check_rows(output, num_rows, type(operator).__name__)
        yield output


def plain_outputs(returned: Any, plain: Callable[[Any], Any]) -> Any:
    """Convert the tensors that `predict_batch` returned, alone or in tuples, dicts and lists, to arrays.

    Leave out entries of a dict that are None.

    Args:
        returned: The value that `predict_batch` returned. A list in it has one entry per row.
        plain: Function that converts a tensor to an array.
    """
    if isinstance(returned, Mapping):
        return {name: plain_outputs(part, plain) for name, part in returned.items() if part is not None}
    if isinstance(returned, tuple):
        parts = [plain_outputs(part, plain) for part in returned]
        return type(returned)(*parts) if hasattr(returned, "_fields") else tuple(parts)
    if isinstance(returned, list):
        return [trees.mapped(row, plain) for row in returned]
    return plain(returned)


def check_rows(output: Any, num_rows: int, name: str) -> None:
    """Check that an output of `predict_batch` has one row for each row of its batch.

    Args:
        output: The output, as arrays.
        num_rows: Number of rows in the batch.
        name: Name of the operator's class, for the error message.

    Raises:
        ValueError: The number of rows differs, or the output is empty.
    """
    if not any(True for _ in trees.leaves(output)):
        raise ValueError(f"`{name}.predict_batch` returned {output!r}: return an output with one row per input row.")
    for part, leaf in trees.leaves(output):
        num_found = trees.rows_of(leaf)
        if num_found != num_rows:
            what = f"a `{type(leaf).__name__}` without rows" if num_found is None else f"{num_found} rows"
            where = f" under `{part}`" if part else ""
            raise ValueError(
                f"`{name}.predict_batch` returned {what}{where} for a batch of {num_rows} rows. Return one row per "
                "input row, in the order of the batch, as a tensor, an array, or a list with an entry for each row. "
                "For several outputs, return a tuple or a dict of these."
            )


DEFAULT_BATCH_SIZE = 32


@dataclass
class PredictionSource:
    """Supplies the data of a `predict` call in pieces. A piece is one batch, or the row indices of one batch.

    Attributes:
        pieces: The pieces, in row order.
        num_batches: Number of batches in the whole data, or None if unknown.
        container: Converts the outputs to the result of the call.
        form: How workers convert the pieces to batches of the framework. None if they need no conversion.
        share: Data to send once to every worker, such as the dataset to which row indices refer. None if no such data
            is needed.
        has_target: True if tuple batches end with a target, False if not. None to assume a target in tuples with
            several elements.
    """

    pieces: Iterator[Any]
    num_batches: int | None
    container: ArrayContainer = field(default_factory=ArrayContainer)
    form: BatchForm | None = None
    share: Any = None
    has_target: bool | None = None

    def work(self, pieces: Sequence[Any]) -> Work:
        """Return what to send to one worker that predicts consecutive pieces."""
        return Work(pieces, self.form, are_rows=self.share is not None)

    def close(self) -> None:
        """If the pieces come from a generator, close the generator."""
        if hasattr(self.pieces, "close"):
            self.pieces.close()


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
    """

    batch_size: int
    has_size: bool = False
    feature_columns: Columns = None

    def size(self, own: int | None) -> int:
        """Return the batch size to use. `own` is the batch size that the data specifies, or None if it has none."""
        return self.batch_size if self.has_size or own is None else own

    def form(self, own: BatchForm) -> BatchForm:
        """Return which columns the batches have, and how they are converted.

        If the user passed `feature_columns` to `predict`, these columns are used without any transform. Otherwise, the
        form that the data specifies applies. Its label column is kept only if it has a transform, because the transform
        may read the label column.

        Args:
            own: The columns and the conversion that the data specifies.
        """
        if self.feature_columns is not None:
            return BatchForm(self.feature_columns)
        return own if own.transform is not None else replace(own, label_column=None)


def source_of(data: Any, asked: BatchRequest, leaf: Callable[[Any], Any] = trees.own) -> PredictionSource | None:
    """Return the source of batches for arrays, data frames or Ray Data. Return None for data of another type.

    Args:
        data: The data that the user passed to `predict`.
        asked: The user's arguments that say how to make batches.
        leaf: Function that converts an array of the results to the user's format.

    Raises:
        TypeError, ValueError: The columns are invalid, or the data has no columns.
        KeyError: A data frame lacks one of the columns.
    """
    kind = kind_of(data)
    if kind == "ray":
        batches = ray_batches(data)
        assert batches is not None, "it is of Ray Data"
        [share] = replace(batches, batch_size=asked.size(batches.batch_size)).shares(1)
        return PredictionSource(share.arrays(), None, RayDataContainer(), asked.form(batches.form))
    check_columns(asked.feature_columns, data.data if isinstance(data, Arrays) else data)
    return _of_arrays(data, asked, leaf) if kind == "rows" else None


def _of_arrays(rows: Any, asked: BatchRequest, leaf: Callable[[Any], Any]) -> PredictionSource:
    arrays = rows if isinstance(rows, Arrays) else Arrays(rows)
    data, form = arrays.data, asked.form(arrays.form)
    has_target = arrays is rows and isinstance(data, tuple) and len(data) > 1
    container = ArrayContainer(leaf, is_dict=isinstance(data, Mapping))
    if is_frame(data):
        container = DataFrameContainer(data.index)
        data = data if form.columns is None else _columns_of(data, form.columns)
    rows = as_arrays(data, in_columns=form.columns is not None)
    size = asked.size(arrays.batch_size)
    starts = range(0, num_rows_of(rows), size) or [0]  # without rows, predict one empty batch, which shows the format

    def batch_at(start: int) -> Any:
        return trees.mapped(rows, lambda array: _rows(array, start, start + size))

    has_target = has_target or form.label_column is not None
    return PredictionSource(map(batch_at, starts), len(starts), container, form, has_target=has_target)


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
