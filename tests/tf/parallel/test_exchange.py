"""The buffer in which gradients travel."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from raysgd.tf.parallel.exchange import GradientLayout

GRADIENTS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32), np.array(2.0, np.float32)]


def test_gradients_come_back_in_their_shapes_times_the_weight() -> None:
    layout = GradientLayout(GRADIENTS)
    buffer = layout.take()
    layout.fill(buffer, GRADIENTS, 0.5)
    assert buffer[-1] == 0.5
    for before, after in zip(GRADIENTS, layout.split(buffer), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert np.array_equal(after, before * 0.5)


def test_every_gradient_begins_where_tensorflow_can_use_it_without_a_copy() -> None:
    layout = GradientLayout(GRADIENTS)
    assert [part.ctypes.data % 64 for part in layout.split(layout.take())] == [0, 0, 0]


def test_what_has_no_weight_may_be_anything() -> None:
    layout = GradientLayout(GRADIENTS)
    buffer = layout.take()
    layout.fill(buffer, [np.full_like(gradient, np.nan) for gradient in GRADIENTS], 0)
    assert not buffer.any()


def test_small_numbers_travel_as_larger_ones_and_large_ones_stay() -> None:
    half = [np.ones(3, np.float16)]
    assert GradientLayout(half).take().dtype == np.float32
    assert GradientLayout(half).split(GradientLayout(half).take())[0].dtype == np.float16
    assert GradientLayout([*half, np.ones(3)]).take().dtype == np.float64


def test_numbers_that_numpy_does_not_know_travel_too() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    gradients = [np.array([1.5, -2.0], ml_dtypes.bfloat16)]
    layout = GradientLayout(gradients)
    buffer = layout.take()
    layout.fill(buffer, gradients, 1.0)
    [back] = layout.split(buffer)
    assert back.dtype == gradients[0].dtype
    assert np.array_equal(back, gradients[0])


def test_a_buffer_is_used_again_only_when_nobody_looks_into_it() -> None:
    layout = GradientLayout(GRADIENTS)
    first = layout.take()
    address = first.ctypes.data
    views = layout.split(first)
    del first
    other = layout.take().ctypes.data
    assert other != address
    last = views[1][1:3]
    del views
    gc.collect()
    assert layout.take().ctypes.data == other
    del last
    kept = [layout.take() for _ in range(2)]
    assert {buffer.ctypes.data for buffer in kept} == {address, other}
