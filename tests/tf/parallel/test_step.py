"""Which batch a step is for, also where batches are drawn ahead, and how a loss counts in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from raysgd.tf.data.batch_streams import StreamItem, TFBatchStream
from raysgd.tf.parallel.step import TFStep


@pytest.mark.parametrize(
    ("num_samples", "weights", "divisor", "factor"),
    [
        (None, (0.0, 0.0), 2.0, 1.0),  # the loop is Keras's
        (0, (0.0, 0.0), 2.0, 1.0),  # padding
        (2, (0.0, 0.0), None, 4.0),  # a sum
        (2, (3.0, 6.0), 3.0, 2.0),  # a mean by the weights of the batch
        (2, (3.0, 6.0), 5.0, 1.0),  # a mean by other weights
        (2, (0.0, 0.0), 5.0, 1.0),  # there are no weights
    ],
)
def test_what_a_batch_says_about_its_loss(
    num_samples: int | None, weights: tuple[float, float], divisor: float | None, factor: float
) -> None:
    assert TFStep(num_samples, num_global=8, weights=weights).factor(divisor) == factor


def tensors(*sizes: int) -> tuple[TFBatchStream, TFStep]:
    """A stream of batches of so many samples of each of two ranks, and its step."""
    import tensorflow as tf

    class Tensors:
        def open(self, pass_index: int, consumed: int) -> Iterator[StreamItem]:
            for size in sizes:
                yield StreamItem((tf.zeros([size, 1]), tf.zeros([size])), size, 2 * size)

    step = TFStep()
    return TFBatchStream(Tensors(), step, lambda: 0), step


def test_a_step_is_for_the_batch_that_was_drawn_last() -> None:
    stream, step = tensors(4, 4, 3, 2)
    used = []
    for index, _ in enumerate(stream.take(None)):
        if index == 2:
            step.skip()
        else:
            used += [step.use(), step.use()]  # two optimizers
    assert used == [4, 4, 4, 4, 2, 2]
    assert step.num_samples is None


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_batches_drawn_ahead_must_be_alike(num_ahead: int) -> None:
    stream, step = tensors(4, 4, 4, 1)
    batches = stream.take(None)
    for _ in range(num_ahead):
        next(batches)
    for _ in itertools.islice(batches, 3 - num_ahead):
        assert step.use() == 4
    next(batches)
    with pytest.raises(RuntimeError, match=r"Batches of .*4, 1 samples .* Draw one batch, train on it"):
        step.use()
    step.forget()
    assert step.use() is None, "what is done by hand afterwards belongs to no batch"
