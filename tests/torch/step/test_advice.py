from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.step.advice import with_advice


class Branches(torch.nn.Module):
    """A model of which the loss uses one branch."""

    def __init__(self, num_unused: int) -> None:
        super().__init__()
        self.used = torch.nn.Linear(1, 1)
        self.unused = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(num_unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


@pytest.mark.parametrize(
    ("num_unused", "names"),
    [
        (1, "parameters (`unused.0.weight`) took"),
        (
            7,
            "`unused.3.weight`, `unused.4.weight` and 2 more)",
        ),
    ],
)
def test_parameters_without_a_gradient_are_named_with_the_way_out(
    num_unused: int, names: str, process_group: None
) -> None:
    model = DistributedDataParallel(Branches(num_unused))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as caught, with_advice([model]):
        model(torch.ones(1, 1))
    assert names in str(caught.value)
    assert "register(ddp_args={'find_unused_parameters': True})" in str(caught.value)
    assert "PyTorch says: Expected to have finished reduction" in str(caught.value)
    assert dist.get_world_size() == 1


def test_what_there_is_no_advice_for_stays_as_it_is() -> None:
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError) as caught, with_advice([]):
        raise error
    assert caught.value is error
    assert str(error) == "something else"
