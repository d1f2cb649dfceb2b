"""Capturing and restoring random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.torch.objects import rng
from tests.helpers.run_if import RunIf


def seed() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed()


def draw() -> list[Any]:
    # `gauss` and `randn` draw two numbers and keep the second one for the next call.
    return [
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.rand(2).tolist(),
        float(np.random.randn()),
    ]


def test_draws_go_on_identically_after_a_restore() -> None:
    draw()
    state = rng.capture()
    expected = [draw(), draw()]
    draw()

    rng.restore(state)

    assert [draw(), draw()] == expected


def test_capturing_does_not_disturb_the_generators() -> None:
    expected = draw()
    seed()
    rng.capture()
    assert draw() == expected


def test_other_ranks_fork_from_where_the_first_one_goes_on() -> None:
    state = rng.capture()
    expected, drawn = draw(), []
    for rank in (0, 1, 2, 1):
        rng.fork(state, rank)
        drawn.append(draw())
    assert drawn[0] == expected
    assert drawn[1] == drawn[3], "it can be repeated"
    for numbers in zip(*drawn[:3], strict=True):
        assert len(set(map(str, numbers))) == 3, "each generator has its own numbers on each rank"


def test_a_generator_that_was_seeded_forks_to_the_same_numbers_whatever_the_others_do() -> None:
    drawn = []
    for seed in (4, 5):
        torch.manual_seed(1)
        random.seed(seed)
        rng.fork({**rng.capture(), "numpy_words": None}, 1)
        drawn.append(draw())
    assert drawn[0][:2] == drawn[1][:2]
    assert drawn[0][2] != drawn[1][2]


def test_states_compare_to_a_plain_bool() -> None:
    first, second = rng.capture(), rng.capture()
    draw()
    assert (first == second) is True
    assert (first == rng.capture()) is False


def test_another_kind_of_numpy_generator_is_left_alone() -> None:
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = rng.capture()
        first = np.random.rand()
        rng.restore(state)
        assert state["numpy_words"] is None
        assert np.random.rand() != first
    finally:
        np.random.set_bit_generator(original)


def test_a_state_without_all_entries_is_refused_by_their_names() -> None:
    state = rng.capture()
    del state["python_words"]
    with pytest.raises(ValueError, match=r"lacks \['python_words'\]"):
        rng.restore(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("torch", b"short"),
        ("torch", None),
        ("python_words", b"short"),
        ("python_version", 1),
        ("numpy_words", bytes(4)),
        ("numpy_position", "first"),
    ],
)
def test_a_damaged_state_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match="It is damaged"):
        rng.restore({**rng.capture(), key: value})


@pytest.mark.gpu
@RunIf(cuda=True)
def test_draws_on_a_gpu_go_on_identically() -> None:
    torch.rand(1, device="cuda")
    state = rng.capture()
    expected = torch.rand(4, device="cuda").tolist()

    rng.restore(state)

    assert torch.rand(4, device="cuda").tolist() == expected


def test_a_state_from_a_machine_with_a_gpu_is_restored_without_one() -> None:
    state = rng.capture()
    expected = draw()
    rng.restore({**state, "torch_cuda": None} if torch.cuda.is_available() else {**state, "torch_cuda": b"0" * 16})
    assert draw() == expected
