"""Advice for mistakes that PyTorch reports: its own words name things that users never see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from raysgd.torch.data.batch_norms import SINGLE_SAMPLE
from raysgd.torch.parallel.step import BatchStep

_UNUSED = "Expected to have finished reduction in the prior iteration"
_SINGLE = "Expected more than 1 value per channel when training"
_MOST_NAMES = 5


@contextmanager
def with_advice(models: Iterable[torch.nn.Module], divided: BatchStep | None = None) -> Iterator[None]:
    """Put advice before the words of an exception that it knows; the exception stays the same object.

    Args:
        models: Those that are trained.
        divided: The step, if its batches are shares of joint batches.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _UNUSED in str(error):
            error.args = (f"{_of_unused_parameters(models)}\n\nPyTorch says: {error}",)
        elif _SINGLE in str(error) and divided is not None and divided.num_samples in (0, 1):
            error.args = (f"{SINGLE_SAMPLE}\n\nPyTorch says: {error}",)
        raise


def _of_unused_parameters(models: Iterable[torch.nn.Module]) -> str:
    names = [
        name.removeprefix("module.")
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    which = f" ({', '.join(f'`{name}`' for name in names[:_MOST_NAMES])}{more})" if names else ""
    return (
        f"Some parameters{which} took no part in the loss of a batch, so the workers wait for their gradients. If they "
        "take part in other batches, pass `register(ddp_args={'find_unused_parameters': True})`. If they are never "
        "trained, call `parameter.requires_grad_(False)` on them before `register`."
    )
