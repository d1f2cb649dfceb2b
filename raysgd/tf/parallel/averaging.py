"""The average of the gradients of all ranks, by samples, in one exchange for each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from raysgd._state.host_buffers import HostBuffers
from raysgd.connections.group import Array, Group
from raysgd.exceptions import IncompatibleModelError, InvalidRegistrationError
from raysgd.tf.parallel.step import Exchange, TracedStep
from raysgd.worker.ledger import Ledger

_EQUAL_WEIGHTS = 1e-6
"""The sum of the ranks' weights is 1 up to this when all have as many samples as the first step had."""

REFUSALS = (IncompatibleModelError, InvalidRegistrationError)
"""What the library raises in a step that is traced."""

_ALIGNMENT = 64
"""Bytes to whose multiple every gradient starts in the buffer: TensorFlow then uses it where it lies."""


class ExchangeRecord:
    """Counts and times the exchanges of gradients, and holds the group that they go through.

    Attributes:
        group: The ranks; another object once the replica has joined another group.
        before_exchange: Called ahead of each exchange, in one of TensorFlow's threads, if it is set. What it raises
            ends the step before it has changed a weight.
        num_completed: Exchanges of gradients that were completed.
        num_per_step: How many a step of a model that is watched has.
        own_s: Seconds of the training call that were not spent in exchanges, up to the last one.
        ledger: Is told when exchanges begin and end.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.before_exchange: Callable[[], None] | None = None
        self.num_completed = 0
        self.num_per_step = 1
        self.own_s = 0.0
        self.ledger: Ledger | None = None
        self._left_at: float | None = None  # when the last exchange of the call was over
        self._num_samples = 0.0  # of this rank, in all exchanges
        self._error: BaseException | None = None

    def forget_call(self) -> None:
        """Forget what was measured."""
        self.own_s, self._num_samples = 0.0, 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside is a training call, or a part of one."""
        self._left_at = time.perf_counter()
        try:
            yield
        finally:
            self._left_at = None

    def own_so_far(self) -> float:
        """Return `own_s` with the time since the last exchange, as while user code hangs."""
        own_s, left_at = self.own_s, self._left_at
        return own_s + (0.0 if left_at is None else time.perf_counter() - left_at)

    @property
    def num_samples(self) -> int:
        """Samples of this rank in the steps of the training call."""
        return int(self._num_samples / self.num_per_step)

    @contextmanager
    def exchanging(self, num_samples: float) -> Iterator[None]:
        """Inside is an exchange, to which this rank comes with so many samples."""
        is_measured = self._left_at is not None
        if self._left_at is not None:
            self.own_s, self._left_at = self.own_so_far(), None
        with nullcontext() if self.ledger is None else self.ledger.exchanging(self.group):
            yield
        self.num_completed += 1
        if is_measured:
            self._num_samples += num_samples
            self._left_at = time.perf_counter()

    @contextmanager
    def surfacing_errors(self) -> Iterator[None]:
        """Raise what an exchange raised, instead of the words that TensorFlow makes of it."""
        self._error = None
        try:
            yield
        except Exception as error:  # TensorFlow makes errors of many classes of one
            cause, self._error = self._error, None
            if cause is None:
                raise
            raise cause from error

    def note_error(self, error: BaseException) -> None:
        """Remember what an exchange raised on its way through TensorFlow."""
        self._error = self._error or error

    @contextmanager
    def noting(self, *kinds: type[BaseException]) -> Iterator[None]:
        """Remember what of these kinds is raised inside: TensorFlow turns it into another error."""
        try:
            yield
        except kinds as error:
            self.note_error(error)
            raise


class GradientLayout:
    """The places of a step's gradients in the buffer; the last number is the weight.

    Buffers are used again once nothing refers to them.
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
        """Return a buffer without views."""
        return self._buffers.take_buffer(self._num_numbers * self._dtype.itemsize).view(self._dtype)

    def fill(self, buffer: Array, gradients: Sequence[Array], weight: float) -> None:
        """Copy the gradients in, times the weight. What has no weight does not count, whatever it is, also NaN."""
        if not weight:
            buffer[:] = 0
            return
        for gradient, place in zip(gradients, self._slices, strict=True):
            np.multiply(gradient.reshape(-1), weight, out=buffer[place], casting="unsafe", dtype=self._dtype)
        buffer[-1] = weight

    def split(self, buffer: Array) -> list[Array]:
        """Return the gradients: views of the buffer where their kind of number is the buffer's."""
        return [
            buffer[place].reshape(shape).astype(dtype, copy=False)
            for place, shape, dtype in zip(self._slices, self._shapes, self._dtypes, strict=True)
        ]


class GradientAverager:
    """Averages the gradients of one optimizer.

    A gradient is copied into the buffer with its weight in one pass, the buffer is added up over all ranks in place,
    and TensorFlow uses the sums where they lie. The weight of a rank is its samples over those of a full step, which is
    what the first step is taken for; the sum of the weights travels along. In full steps it is 1, and nothing more is
    to be done.

    Args:
        exchanges: Has the group, and counts.
        traced: The step of a Keras loop.
        num_samples_of: See `GlobalLosses`.
    """

    def __init__(
        self, exchanges: ExchangeRecord, traced: TracedStep, num_samples_of: Callable[[int, Exchange], float]
    ) -> None:
        self._exchanges, self._traced, self._num_samples_of = exchanges, traced, num_samples_of
        self._full_step: float | None = None
        self._layouts: dict[tuple[Any, ...], GradientLayout] = {}

    def forget_full_step(self) -> None:
        """Take the next step for a full one: the ranks of a new group have none in common."""
        self._full_step = None

    def average(self, gradients: Sequence[Any], repeat: Exchange) -> list[Any]:
        """Return the mean of all ranks' gradients, as tensors; None stays None.

        Args:
            gradients: Those of this rank.
            repeat: Does the same without samples, where this rank has none in a later step.
        """
        import tensorflow as tf

        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return list(gradients)
        dense = [tf.convert_to_tensor(gradient) for gradient in given if not isinstance(gradient, tf.IndexedSlices)]
        sparse = [part for gradient in given if isinstance(gradient, tf.IndexedSlices) for part in _parts(gradient)]
        count = self._traced.num_samples_or_unknown()
        sent = [*dense, *sparse]
        exchange = partial(self._exchange, len(dense), repeat)
        found = tf.numpy_function(exchange, [count, *sent], [tensor.dtype for tensor in sent])
        received = tf.nest.flatten(found)  # eagerly, a single tensor comes without a list
        for index, (before, after) in enumerate(zip(sent, received, strict=True)):
            after.set_shape(before.shape if index < len(dense) else [None, *before.shape[1:]])
        averages, joined = iter(received), iter(received[len(dense) :])
        return [_like(gradient, averages, joined) for gradient in gradients]

    def _exchange(self, num_dense: int, repeat: Exchange, count: Array, *gradients: Array) -> list[Array]:
        """Run whenever the graph does, in one of TensorFlow's threads."""
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
        """Return the rows of all ranks in a row, as one process would have them: values and indices in turns."""
        group = self._exchanges.group
        own = [part if index % 2 else (part * weight).astype(part.dtype) for index, part in enumerate(parts)]
        counts = group.gather(np.array([len(part) for part in own], np.int64))
        return [group.gather_rows(part, [int(count[index]) for count in counts]) for index, part in enumerate(own)]


def _parts(gradient: Any) -> tuple[Any, Any]:
    return gradient.values, gradient.indices


def _like(gradient: Any, averages: Iterator[Any], joined: Iterator[Any]) -> Any:
    """Return the average in the form that the gradient had. A sparse one has the rows of all ranks, also those twice.

    It makes a difference: optimizers treat rows that come twice, or not at all, in ways of their own.
    """
    import tensorflow as tf

    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return next(averages)
    return tf.IndexedSlices(next(joined), next(joined), gradient.dense_shape)
