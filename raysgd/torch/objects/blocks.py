"""Finds the blocks of a large model, and lets the backward pass recompute their activations to save memory.

A block is an element of a `ModuleList` or `Sequential` that has parameters: a layer of a transformer, or a stage of a
convolutional network. Elements inside another block are not blocks, so blocks are never nested.

ADR 23 explains why models are changed in place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def blocks_of(model: torch.nn.Module, min_parameters: int = 1) -> list[torch.nn.Module]:
    """Return a model's distinct blocks that have at least `min_parameters` parameter elements each.

    A block that occurs twice, or that shares a parameter with a module outside of the block, is omitted.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> blocks_of(model)
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=1, bias=True)]
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        block
        for block in dict.fromkeys(_elements(model))
        if sum(parameter.numel() for parameter in block.parameters()) >= min_parameters and not _shares(block, owners)
    ]


def _elements(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        is_element = isinstance(module, torch.nn.Sequential | torch.nn.ModuleList)
        if is_element and not isinstance(child, torch.nn.ModuleList):  # a `ModuleList` has no forward pass
            yield child
        else:
            yield from _elements(child)


def _shares(block: torch.nn.Module, owners: Counter[int]) -> bool:
    own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
    return any(owners[identity] > count for identity, count in own.items())


def _recomputed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the forward pass of a block and store only its inputs. The backward pass recomputes the activations."""
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Let the blocks of a model recompute their activations in the backward pass. Return the number of changed blocks.

    The keys of the model's state dict do not change. A block with a batch norm is not changed, because a second forward
    pass of the block would update the running statistics twice for each batch.
    """
    blocks = [block for block in blocks_of(model) if not any(map(_is_batch_norm, block.modules()))]
    for block in blocks:
        block.forward = partial(_recomputed, block.forward)
    if not blocks:
        logger.warning(
            "`activation_checkpointing=True` has no effect, because no element of a `ModuleList` or `Sequential` in "
            "`%s` is free of batch norm",
            type(model).__name__,
        )
    return len(blocks)


def _is_batch_norm(part: torch.nn.Module) -> bool:
    """Return True if a module stores or synchronizes batch statistics. Other libraries' modules are recognized, too."""
    has_statistics = any(name == "running_mean" for name, _ in part.named_buffers(recurse=False))
    return has_statistics or isinstance(part, torch.nn.SyncBatchNorm)


def without_checkpointing(model: torch.nn.Module) -> torch.nn.Module:
    """Let the blocks of a model store their activations again, as before `checkpoint_activations`. Return the model."""
    for part in model.modules():
        if getattr(vars(part).get("forward"), "func", None) is _recomputed:
            del part.forward
    return model
