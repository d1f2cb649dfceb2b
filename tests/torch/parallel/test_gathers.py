"""Gathers whose sizes are compared; with several ranks they are in `test_global_batch_integration.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

from raysgd.torch.step.advice import comparing_sizes


def gathered_in_all_ways() -> list[list[float]]:
    """What a rank alone gathers."""
    own, parts, whole = torch.ones(2), [torch.zeros(2)], torch.zeros(2)
    dist.all_gather(parts, own)
    dist.all_gather_into_tensor(whole, own)
    objects: list[float] = [0.0]
    dist.all_gather_object(objects, 1.0)
    return [each.tolist() for each in (*parts, whole, *all_gather(own))] + [objects]


@pytest.mark.parametrize("differ", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_fits_is_gathered_as_ever_and_afterwards_nothing_stands_between(differ: bool, process_group: None) -> None:
    before, asked = dict(vars(dist.ProcessGroup)), []

    def shares_differ() -> bool:
        asked.append(differ)
        return differ

    with comparing_sizes(shares_differ):
        inside = gathered_in_all_ways()
    assert len(asked) >= 4, "every way is looked at"
    assert dict(vars(dist.ProcessGroup)) == before
    assert gathered_in_all_ways() == inside == [[1.0, 1.0]] * 3 + [[1.0]]
