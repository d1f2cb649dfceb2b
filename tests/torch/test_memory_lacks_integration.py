"""`micro_batch_size="auto"`: a rank runs out of memory, and all ranks repeat the step in smaller batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raysgd import Recovery
from raysgd.torch import TorchTrainer
from tests.torch.memory_lacks import OPERATORS, PLACES, Short, Stock, run

pytestmark = pytest.mark.integration

EACH = [[(2, place, rank)] for place, rank in zip(PLACES, (0, 1, 0, 1), strict=True)]


@pytest.mark.parametrize("operator_cls", OPERATORS)
def test_the_weights_are_those_of_a_training_in_which_no_memory_lacked(
    operator_cls: type[Short], ray_cluster: None
) -> None:
    found, seconds, sizes = run(operator_cls, 2, EACH, "auto")
    expected, *_ = run(operator_cls, 2, [[]] * len(EACH), None)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
    assert len(seconds) == len(EACH)
    assert sizes[:3] == [6, 6, 6]


def test_one_worker_repeats_its_step_too(ray_cluster: None) -> None:
    lacks = [[(0, "forward", 0)], [(2, "backward", 0)]]
    found, _, sizes = run(Stock, 1, lacks, "auto")
    expected, *_ = run(Stock, 1, [[]] * len(lacks), None)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
    assert sizes == [12, 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fsdp"}, 'cannot work with `strategy="fsdp"`'),
        ({"recovery": Recovery(in_place=False)}, r"cannot work with `Recovery\(in_place=False\)`"),
        ({"use_local": True}, "cannot work with `use_local=True`"),
    ],
)
def test_what_cannot_repeat_a_step_in_place_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchTrainer(Stock, split_batches=True, micro_batch_size="auto", use_gpu=False, **options)
