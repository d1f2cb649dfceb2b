"""Copies of tensors that are taken again and again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from raysgd.torch.step.tensor_copies import PooledCopies, TensorCopies


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_tensors_of_several_kinds_get_their_numbers_back() -> None:
    weight = torch.nn.Parameter(numbers(1, 2))
    count = numbers(3, dtype=torch.int64)
    copies = TensorCopies([weight, count, weight], [])
    for change in (1.0, 10.0):
        before = [weight.tolist(), count.tolist()]
        copies.take()
        with torch.no_grad():
            weight.add_(change)
        count.add_(1)
        copies.put_back()
        assert [weight.tolist(), count.tolist()] == before
        with torch.no_grad():
            weight.mul_(3)


def test_memory_of_copies_is_used_again() -> None:
    weight = numbers(1, 2)
    copies = TensorCopies([weight], [])
    assert copies.num_bytes_new == weight.nbytes
    copies.take()
    [(_, [first])] = copies._groups.values()
    assert copies.num_bytes_new == 0
    weight.add_(1)
    copies.take()
    [(_, [second])] = copies._groups.values()
    assert second is first
    assert second.tolist() == [2, 3]


def test_after_there_was_no_memory_for_one_all_are_copied() -> None:
    weights = [numbers(1), numbers(2).expand(2**60), numbers(3)]
    copies = TensorCopies(weights, [])
    with pytest.raises(RuntimeError, match="memory"):
        copies.take()
    assert not copies.are_complete
    weights[1].set_(numbers(2))  # type: ignore[call-overload]
    copies.take()
    torch._foreach_add_(weights, 1.0)
    copies.put_back()
    assert [each.tolist() for each in weights] == [[1], [2], [3]]


def test_what_is_still_is_copied_once_it_has_changed() -> None:
    weight, mask = numbers(1), numbers(5)
    copies = TensorCopies([weight], [mask])
    copies.take()
    assert copies.are_complete
    mask.add_(1)
    assert not copies.are_complete, "this change cannot be undone"
    copies.take()
    mask.add_(1)
    assert copies.are_complete
    copies.put_back()
    assert mask.tolist() == [6]


def test_there_is_nothing_to_copy_of_a_model_without_tensors() -> None:
    assert not TensorCopies([], [])
    assert TensorCopies([], [numbers(1)])


def test_pooled_copies_keep_no_tensor_that_is_not_copied_any_more() -> None:
    pool, weight = PooledCopies(), numbers(1)
    undo = pool.undo_of(weight)
    assert undo is not None
    weight.add_(1)
    undo()
    assert weight.tolist() == [1]
    assert pool.undo_of("no tensor") is None
    gone = weakref.ref(weight)
    del weight, undo
    pool.begin()
    pool.begin()
    gc.collect()
    assert gone() is None


def test_a_tensor_of_another_shape_gets_another_copy() -> None:
    pool, weight = PooledCopies(), numbers(1, 2)
    pool.undo_of(weight)
    pool.begin()
    weight.resize_(1)
    undo = pool.undo_of(weight)
    weight.zero_()
    assert undo is not None
    undo()
    assert weight.tolist() == [1]
