"""One round of a `predict` call in one worker: the driver's request, and how the worker computes the outputs.

In each round, every worker predicts some batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.arrays import trees
from raysgd.core.arrays.ray_batches import BatchForm
from raysgd.trainer.messages.epochs import bind_batch_info

AsBatch = Callable[[Any, BatchForm], Any]
"""Function that converts arrays to a batch in the framework's format."""

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
class Batches:
    """The batches that one worker predicts in one round of a `predict` call.

    Attributes:
        batches: The batches in the format of the user's data, in row order.
        form: How to convert arrays and dicts of columns to batches of the framework. None if the batches need no
            conversion.
    """

    batches: Sequence[Any]
    form: BatchForm | None = None

    def made(self, as_batch: AsBatch, num_rows_of: Callable[[Any], int]) -> Iterator[tuple[Any, int]]:
        """Yield each batch in the framework's format, with its number of rows.

        Args:
            as_batch: Function that converts a batch according to `form`.
            num_rows_of: Function that returns the number of rows in a converted batch.
        """
        for rows in self.batches:
            batch = rows if self.form is None else as_batch(rows, self.form)
            yield batch, num_rows_of(batch)


@dataclass(frozen=True)
class Rows:
    """The rows of a dataset that one worker predicts in one round of a `predict` call.

    Each range contains the row indices of one batch. Every worker already has the whole dataset.
    """

    ranges: Sequence[range]


Work = Batches | Rows


class PredictionPlace:
    """The progress of a `predict` call in one worker.

    The progress of other calls is read from attributes of a batch stream. This class has the same attributes.

    Attributes:
        source: Always None. In a batch stream, this attribute is the source of the batches.
        num_batches_taken: Estimated number of batches that all workers together have completed.
    """

    def __init__(self, request: PredictRequest) -> None:
        self.source = None
        self._request = request
        self.num_batches_taken = request.num_done

    def note_batches(self, num_own: int) -> None:
        """Record how many batches of the current round this worker has completed.

        The other workers are assumed to have completed as many.
        """
        done, total = self._request.num_done + num_own * self._request.num_workers, self._request.total
        self.num_batches_taken = done if total is None else min(done, total)


def outputs_of(
    operator: Any,
    batches: Iterable[tuple[Any, int]],
    request: PredictRequest,
    place: PredictionPlace,
    plain: Callable[..., Any],
) -> list[Any]:
    """Return the output of the operator's `predict_batch` for each batch, converted to arrays.

    Args:
        operator: Operator whose `predict_batch` is called.
        batches: This worker's batches in this round, each with its number of rows.
        request: The driver's request for this round.
        place: Record of the progress, which is updated after each batch.
        plain: Function that converts a tensor to an array.

    Raises:
        ValueError: The number of rows in an output differs from that of its batch, or an output is empty.
    """
    predict_batch, outputs = bind_batch_info(operator.predict_batch), []
    for number, (batch, num_rows) in enumerate(batches):
        has_several = isinstance(batch, tuple | list) and len(batch) > 1
        has_target = has_several if request.has_target is None else request.has_target
        where = {"batch_idx": request.first_batch + number, HAS_TARGET: has_target}
        output = as_arrays(predict_batch(batch, {**request.info, **where}), plain)
        check_rows(output, num_rows, type(operator).__name__)
        outputs.append(output)
        place.note_batches(number + 1)
    return outputs


def as_arrays(returned: Any, plain: Callable[[Any], Any]) -> Any:
    """Convert the tensors that `predict_batch` returned, alone or in tuples, dicts and lists, to arrays.

    Leave out entries of a dict that are None.

    Args:
        returned: The value that `predict_batch` returned. A list in it has one entry per row.
        plain: Function that converts a tensor to an array.
    """
    if isinstance(returned, Mapping):
        return {name: as_arrays(part, plain) for name, part in returned.items() if part is not None}
    if isinstance(returned, tuple):
        parts = [as_arrays(part, plain) for part in returned]
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
            raise ValueError(_wrong(name, part, what, num_rows))


def _wrong(name: str, part: str, what: str, num_rows: int) -> str:
    where = f" under `{part}`" if part else ""
    return (
        f"`{name}.predict_batch` returned {what}{where} for a batch of {num_rows} rows. Return one row per input row, "
        "in the order of the batch, as a tensor, an array, or a list with an entry for each row. For several outputs, "
        "return a tuple or a dict of these."
    )
