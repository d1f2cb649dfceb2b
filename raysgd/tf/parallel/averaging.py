"""Averages gradients across all ranks, weighted by samples.

Each optimizer step runs one all-reduce for all its dense gradients. Sparse gradients are gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.connections.group import Array, Group
from raysgd.core.state.state_codec import HostBuffers
from raysgd.exceptions import IncompatibleModelError, InvalidRegistrationError
from raysgd.tf.parallel.step import Exchange, TracedStep, assigned
from raysgd.trainer.worker.ledger import Ledger

_EQUAL_WEIGHTS = 1e-6
"""Maximum difference from 1 at which the sum of the ranks' weights counts as 1, so that no division is needed."""

REFUSALS = (IncompatibleModelError, InvalidRegistrationError)
"""Exceptions that raysgd raises while TensorFlow traces a step, if it does not support the user's model or step."""

_ALIGNMENT = 64
"""Alignment of gradients in the buffer, in bytes. With this alignment, TensorFlow uses them without a copy."""


class ExchangeRecord:
    """Counts the gradient all-reduces, here called exchanges, and measures the time between exchanges.

    Attributes:
        group: The group of ranks that exchange gradients. It is replaced when the replica joins another group.
        before_exchange: If set, called before each exchange, in one of TensorFlow's threads. If the function raises an
            exception, the step ends before any weight has changed.
        num_completed: Number of completed exchanges.
        num_per_step: Number of exchanges in a step of a Keras loop.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.before_exchange: Callable[[], None] | None = None
        self.num_completed = 0
        self.num_per_step = 1
        self._ledger, self._is_measuring = Ledger(), False
        self._num_samples = 0.0  # samples that this rank contributed to all-reduces in the call
        self._error: BaseException | None = None

    def forget_call(self) -> None:
        """Reset the number of samples. Call this at the start of a training call."""
        self._num_samples = 0.0

    def measuring(self, ledger: Ledger) -> AbstractContextManager[None]:
        """Count this rank's samples in the block, which runs a training call or a part of it, and measure its time.

        Args:
            ledger: Object to which the start and end of each exchange is reported, from now on.
        """
        self._ledger = ledger
        ledger.begin_own_work()
        return assigned(self, _is_measuring=True)

    @property
    def num_samples(self) -> int:
        """Number of this rank's samples in the steps of the training call."""
        return int(self._num_samples / self.num_per_step)

    @contextmanager
    def exchanging(self, num_samples: float) -> Iterator[None]:
        """Count and time the gradient all-reduce that runs inside the block.

        Args:
            num_samples: Number of samples that this rank contributes.
        """
        with self._ledger.exchanging(self.group):
            yield
        self.num_completed += 1
        self._num_samples += num_samples if self._is_measuring else 0.0

    @contextmanager
    def surfacing_errors(self) -> Iterator[None]:
        """If the block fails and an exception was recorded by `note_error`, raise the recorded exception.

        If an all-reduce or a check fails while TensorFlow runs or traces a graph, TensorFlow raises an exception of
        another class. The recorded exception is the original one.
        """
        self._error = None
        try:
            yield
        except Exception as error:  # TensorFlow converts exceptions into errors of various classes
            cause, self._error = self._error, None
            if cause is None:
                raise
            raise cause from error

    def note_error(self, error: BaseException) -> None:
        """Record the exception that `surfacing_errors` will raise. Only the first recorded exception is kept."""
        self._error = self._error or error

    @contextmanager
    def noting(self, *kinds: type[BaseException]) -> Iterator[None]:
        """If the block raises an exception of these classes, record the exception for `surfacing_errors`."""
        try:
            yield
        except kinds as error:
            self.note_error(error)
            raise


class GradientLayout:
    """Maps a step's gradients to positions in a flat buffer, whose last element is the rank's weight.

    Buffers are reused when no array or tensor refers to them anymore.
    """

    def __init__(self, gradients: Sequence[Array]) -> None:
        self._dtype = np.dtype(np.float64 if any(g.dtype == np.float64 for g in gradients) else np.float32)
        step = _ALIGNMENT // self._dtype.itemsize
        self._shapes = [gradient.shape for gradient in gradients]
        self._dtypes = [gradient.dtype for gradient in gradients]
        self._slices = []
        end = 0
        for gradient in gradients:
            self._slices.append(slice(end, end + gradient.size))
            end += -(-gradient.size // step) * step
        self._num_numbers = end + 1
        self._buffers = HostBuffers()

    def free_buffer(self) -> Array:
        """Return a flat buffer that is not in use. Create a new buffer if all are in use."""
        return self._buffers.take_buffer(self._num_numbers * self._dtype.itemsize).view(self._dtype)

    def fill(self, buffer: Array, gradients: Sequence[Array], weight: float) -> None:
        """Multiply the gradients by the rank's weight and copy them into the buffer, together with the weight.

        With weight 0, the buffer is filled with zeros, even if gradients are NaN.
        """
        if not weight:
            buffer[:] = 0
            return
        for gradient, place in zip(gradients, self._slices, strict=True):
            np.multiply(gradient.reshape(-1), weight, out=buffer[place], casting="unsafe", dtype=self._dtype)
        buffer[-1] = weight

    def split(self, buffer: Array) -> list[Array]:
        """Return the gradients in the buffer, as views if they have the buffer's dtype, and otherwise as copies."""
        return [
            buffer[place].reshape(shape).astype(dtype, copy=False)
            for place, shape, dtype in zip(self._slices, self._shapes, self._dtypes, strict=True)
        ]


class GradientAverager:
    """Averages gradients, those of all optimizers of an operator.

    Dense gradients are multiplied by the rank's weight and copied into a flat buffer. The buffer is all-reduced in
    place, and TensorFlow uses the sums without a copy.

    A rank's weight is its number of samples, divided by the number of ranks and by the number of samples per rank in a
    full step. The first step is assumed to be full. The weight is all-reduced along with the gradients. In full steps,
    the weights sum to 1. In other steps, the summed gradients are divided by the sum of the weights.

    Args:
        exchanges: Holds the group of ranks, and counts the all-reduces.
        traced: The step of a Keras loop that is being traced.
        num_samples_of: Returns the step's number of samples; see `GlobalLosses.num_samples_of`.
    """

    def __init__(
        self, exchanges: ExchangeRecord, traced: TracedStep, num_samples_of: Callable[[int, Exchange], float]
    ) -> None:
        self._exchanges, self._traced, self._num_samples_of = exchanges, traced, num_samples_of
        self._full_step: float | None = None
        self._layouts: dict[tuple[Any, ...], GradientLayout] = {}

    def forget_full_step(self) -> None:
        """Forget the number of samples in a full step. The next step is then assumed to be full.

        Call this when the group has changed, because all ranks of a group must use the same number.
        """
        self._full_step = None

    def average(self, gradients: Sequence[Any], repeat: Exchange) -> list[Any]:
        """Return the sample-weighted mean of all ranks' gradients, as tensors. A None in `gradients` stays None.

        Args:
            gradients: This rank's gradients.
            repeat: Function that repeats this all-reduce, for a later step in which this rank has no samples.
        """
        import tensorflow as tf

        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return list(gradients)
        dense = [tf.convert_to_tensor(gradient) for gradient in present if not isinstance(gradient, tf.IndexedSlices)]
        sparse = [part for gradient in present if isinstance(gradient, tf.IndexedSlices) for part in _parts(gradient)]
        count = self._traced.num_samples_or_unknown()
        sent = [*dense, *sparse]
        exchange = partial(self._exchange, len(dense), repeat)
        exchanged = tf.numpy_function(exchange, [count, *sent], [tensor.dtype for tensor in sent])
        received = tf.nest.flatten(exchanged)  # in eager mode, `numpy_function` returns a single tensor without a list
        for index, (before, after) in enumerate(zip(sent, received, strict=True)):
            after.set_shape(before.shape if index < len(dense) else [None, *before.shape[1:]])
        averages, joined = iter(received), iter(received[len(dense) :])
        return [_like(gradient, averages, joined) for gradient in gradients]

    def _exchange(self, num_dense: int, repeat: Exchange, count: Array, *gradients: Array) -> list[Array]:
        """All-reduce the gradients. Return the averaged dense gradients, followed by the parts of the sparse gradients.

        TensorFlow calls this in one of its threads each time that the graph runs.
        """
        with self._exchanges.noting(BaseException):
            if self._exchanges.before_exchange is not None:
                self._exchanges.before_exchange()
            num_samples = self._num_samples_of(int(count), repeat)
            with self._exchanges.exchanging(num_samples):
                return self._averaged(num_samples, gradients[:num_dense], gradients[num_dense:])

    def _averaged(self, num_samples: float, gradients: Sequence[Array], sparse: Sequence[Array]) -> list[Array]:
        group = self._exchanges.group
        if self._full_step is None:
            self._full_step = max(1.0, group.largest(num_samples))
        key = tuple((gradient.shape, gradient.dtype) for gradient in gradients)
        layout = self._layouts.get(key) or self._layouts.setdefault(key, GradientLayout(gradients))
        buffer = layout.free_buffer()
        weight = num_samples / (self._full_step * group.size)
        layout.fill(buffer, gradients, weight)
        group.add_up(buffer)
        total = float(buffer[-1])
        if total and abs(total - 1.0) > _EQUAL_WEIGHTS:
            buffer *= 1.0 / total
        joined = self._joined(weight / total if total else 0.0, sparse) if sparse else []
        return [*layout.split(buffer), *joined]

    def _joined(self, weight: float, parts: Sequence[Array]) -> list[Array]:
        """Return the sparse gradients of all ranks, concatenated.

        Args:
            weight: This rank's weight in the mean. The rank's values are multiplied by this weight.
            parts: The values and the indices of this rank's first sparse gradient, then of the second, and so on.
        """
        group = self._exchanges.group
        own = [part if index % 2 else (part * weight).astype(part.dtype) for index, part in enumerate(parts)]
        counts = group.gather(np.array([len(part) for part in own], np.int64))
        return [group.gather_rows(part, [int(count[index]) for count in counts]) for index, part in enumerate(own)]


def _parts(gradient: Any) -> tuple[Any, Any]:
    return gradient.values, gradient.indices


def _like(gradient: Any, averages: Iterator[Any], joined: Iterator[Any]) -> Any:
    """Return the average of one gradient, from `averages` if the gradient is dense, or from `joined` if it is sparse.

    A sparse average has the rows of all ranks. Rows with the same index are not summed here, because optimizers treat
    duplicate rows in their own way.
    """
    import tensorflow as tf

    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return next(averages)
    return tf.IndexedSlices(next(joined), next(joined), gradient.dense_shape)
