"""One round of `predict` in a replica: the request, and the output for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.arrays import trees
from raysgd.core.arrays.ray_batches import BatchForm
from raysgd.trainer.messages.epochs import bind_batch_info

AsBatch = Callable[[Any, BatchForm], Any]
"""Converts arrays to a batch of the framework."""

HAS_TARGET = "has_target"
"""Key in `batch_info` of `predict_batch`: True if the last part of a tuple is a target."""


@dataclass(frozen=True)
class PredictRequest:
    """One round of a prediction, as one worker sees it.

    Attributes:
        key: Name of the prediction, under which workers keep its data.
        info: The caller's `info` for the operator.
        has_target: True if batches that are tuples end with a target; None to decide by their length.
        first_batch: Index, among all batches, of the first one of this worker.
        num_done: Number of batches that all workers together did before the round.
        num_workers: Number of workers in the round.
        total: Number of batches in all; None if unknown.
        is_last: True if the workers can drop the data of the prediction afterwards.
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
    """Batches in the format of the data.

    Attributes:
        batches: The batches.
        form: Conversion of arrays and dicts of columns; None for batches that are ready.
    """

    batches: Sequence[Any]
    form: BatchForm | None = None

    def made(self, as_batch: AsBatch, num_rows_of: Callable[[Any], int]) -> Iterator[tuple[Any, int]]:
        """Yield the batches, each with its number of rows."""
        for given in self.batches:
            batch = given if self.form is None else as_batch(given, self.form)
            yield batch, num_rows_of(batch)


@dataclass(frozen=True)
class Rows:
    """Rows of a dataset that every worker has: a range of indices for each batch."""

    ranges: Sequence[range]


Work = Batches | Rows


class PredictionPlace:
    """The progress of a replica in a prediction; used in place of a stream.

    Attributes:
        source: None: there is no source that knows the number of batches.
        num_steps_taken: Estimated number of batches that all workers have done.
    """

    def __init__(self, request: PredictRequest) -> None:
        self.source = None
        self._request = request
        self.num_steps_taken = request.num_done

    def note_batches(self, num_own: int) -> None:
        """Note how many batches of the round this worker has done. The others are assumed to be equally far."""
        done, total = self._request.num_done + num_own * self._request.num_workers, self._request.total
        self.num_steps_taken = done if total is None else min(done, total)


def outputs_of(
    operator: Any,
    batches: Iterable[tuple[Any, int]],
    request: PredictRequest,
    place: PredictionPlace,
    plain: Callable[..., Any],
) -> list[Any]:
    """Return the output of the operator's `predict_batch` for each batch, as arrays.

    Args:
        operator: The operator.
        batches: This worker's batches, each with its number of rows.
        request: The round.
        place: Updated after each batch.
        plain: Converts a tensor to an array.

    Raises:
        ValueError: An output does not have the rows of its batch.
    """
    predict_batch, found = bind_batch_info(operator.predict_batch), []
    for number, (batch, num_rows) in enumerate(batches):
        has_several = isinstance(batch, tuple | list) and len(batch) > 1
        has_target = has_several if request.has_target is None else request.has_target
        where = {"batch_idx": request.first_batch + number, HAS_TARGET: has_target}
        output = as_arrays(predict_batch(batch, {**request.info, **where}), plain)
        check_rows(output, num_rows, type(operator).__name__)
        found.append(output)
        place.note_batches(number + 1)
    return found


def as_arrays(returned: Any, plain: Callable[[Any], Any]) -> Any:
    """Convert tensors in tuples, dicts and lists to arrays. A list has an entry for each row."""
    if isinstance(returned, Mapping):
        return {name: as_arrays(part, plain) for name, part in returned.items() if part is not None}
    if isinstance(returned, tuple):
        parts = [as_arrays(part, plain) for part in returned]
        return type(returned)(*parts) if hasattr(returned, "_fields") else tuple(parts)
    if isinstance(returned, list):
        return [trees.mapped(row, plain) for row in returned]
    return plain(returned)


def check_rows(output: Any, num_rows: int, name: str) -> None:
    """Check that an output has one row for each row of its batch.

    Raises:
        ValueError: It has another number of rows.
    """
    if not any(True for _ in trees.leaves(output)):
        raise ValueError(f"`{name}.predict_batch` returned {output!r}: return an output with a row for each row.")
    for part, leaf in trees.leaves(output):
        found = trees.rows_of(leaf)
        if found != num_rows:
            what = f"a `{type(leaf).__name__}` without rows" if found is None else f"{found} rows"
            raise ValueError(_wrong(name, part, what, num_rows))


def _wrong(name: str, part: str, what: str, num_rows: int) -> str:
    where = f" under `{part}`" if part else ""
    return (
        f"`{name}.predict_batch` returned {what}{where} for a batch of {num_rows} rows: return one for each row, in "
        "the order of the batch, as a tensor, an array, or a list with an entry for each row; for several outputs "
        "return a tuple or a dict of these."
    )
