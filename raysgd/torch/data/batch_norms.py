"""Batch norms and shares of a joint batch: single samples are refused in time, and padding does not count.

A batch norm cannot train on one value per channel. Which shares have a single sample: ADR 98.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm
from torch.nn.functional import batch_norm

from raysgd.torch.data.batch_streams import DividedLoaderSource
from raysgd.torch.data.pass_plan import PassPlan
from raysgd.torch.parallel.step import BatchStep

LOCAL = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
"""Those that look at the batch of their own rank."""

SINGLE_SAMPLE = (
    "A batch norm cannot train on a single sample, and sizes leave a worker one here: the joint batch has one sample, "
    "or batches of a worker have two at most. Pass `drop_last=True` to the train loader, choose another batch size or "
    "`max_batch_per_worker` (at least 3), pass `sync_batchnorm=True` on GPUs, or use a norm that looks at each sample "
    "by itself, such as `GroupNorm`."
)


@contextmanager
def refusing_single_samples(models: Iterable[Module], source: DividedLoaderSource, step: BatchStep) -> Iterator[None]:
    """Refuse a pass with a share that a batch norm cannot train on in its first step, instead of where it comes.

    Only what each sample gives as one value is sure to fail: images have many values per channel, and a model may join
    several views of a sample.
    """
    norms = [module for model in models for module in model.modules() if isinstance(module, LOCAL)]
    handles: list[Any] = []

    def look(norm: Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not norm.training or not inputs or inputs[0].dim() < 2:
            return
        values = inputs[0].numel() // max(1, inputs[0].size(1))
        if values == len(inputs[0]) == step.num_samples:
            raise ValueError(SINGLE_SAMPLE)

    def prepare(plan: PassPlan) -> None:
        if plan.has_single_samples and not handles:
            handles.extend(norm.register_forward_pre_hook(look) for norm in norms)

    source.check_plan = prepare
    try:
        yield
    finally:
        source.check_plan = None
        _remove(handles)


def leave_out(models: Iterable[Module]) -> Callable[[], None]:
    """Let synchronized batch norms take the next batch for none, as it is padding; return what ends that.

    They still take part in the exchanges that other ranks wait for.
    """
    norms = [module for model in models for module in model.modules() if isinstance(module, SyncBatchNorm)]
    handles = [handle for norm in norms for handle in _left_out(norm)]
    return lambda: _remove(handles)


def _left_out(norm: SyncBatchNorm) -> list[Any]:
    shown: list[torch.Tensor] = []

    def without_samples(norm: Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not norm.training or not inputs:
            return None
        shown.append(inputs[0])
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)  # that of statistics, on all ranks
        return (inputs[0][:0].to(dtype),)

    def by_itself(norm: SyncBatchNorm, inputs: object, nothing: torch.Tensor) -> torch.Tensor | None:
        if not shown:
            return None
        output = batch_norm(shown.pop(), None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
        return output + nothing.sum().to(output.dtype)  # so that the backward pass takes part, too

    return [norm.register_forward_pre_hook(without_samples), norm.register_forward_hook(by_itself)]


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
