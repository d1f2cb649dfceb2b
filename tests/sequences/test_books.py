"""The books say what calls have to return, and find samples that were not used or were used twice."""

from __future__ import annotations

import pytest

from tests.sequences.books import BATCH_SIZE, NUM_OTHERS, NUM_SAMPLES, Books, Wrong, compare


def test_passes_follow_one_another() -> None:
    books = Books()
    assert books.train() == {"epoch": 1, "num_samples": NUM_SAMPLES, "loss": 0}
    assert books.train(3) == {"epoch": 2, "num_samples": 3 * BATCH_SIZE, "loss": -1}
    assert books.train_on_others(None, is_new=True) == {"epoch": 3, "num_samples": NUM_OTHERS, "loss": 0}
    assert books.train() == {"epoch": 3, "num_samples": NUM_SAMPLES - 3 * BATCH_SIZE, "loss": -1}
    books.check_weights([[2.0] * NUM_SAMPLES + [1.0] * NUM_OTHERS])


@pytest.mark.parametrize("changes", [{0: 0.0}, {0: 2.0}, {0: 0.0, 1: 2.0}], ids=["not used", "twice", "instead"])
def test_another_use_of_a_sample_is_found(changes: dict[int, float]) -> None:
    books = Books()
    books.train()
    table = [1.0] * NUM_SAMPLES + [0.0] * NUM_OTHERS
    books.check_weights([table])
    for sample, number in changes.items():
        table[sample] = number
    with pytest.raises(Wrong, match="registered data"):
        books.check_weights([table])


def test_the_result_of_the_call_before_is_found() -> None:
    books = Books()
    before = {"epoch": 1, "num_samples": NUM_SAMPLES, "train_loss": 0.0}
    compare("train", before, books.train(), is_whole=True)
    with pytest.raises(Wrong, match="epoch 1, expected 2"):
        compare("train", before, books.train(), is_whole=False)
