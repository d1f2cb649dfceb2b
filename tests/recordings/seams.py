"""The order of events in a worker: draw, forward, backward, all-reduce, step, commit. Workers import this.

They are seen from outside, at places that PyTorch, the data and the engine own, so that two versions of what lies
between can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.connections.group import Group
from raysgd.core.numbers.meters import AverageMeterCollection

EVENTS: list[str] = []
"""What has happened in this process since the last time that somebody asked."""
_MESH = ("add_up", "add_up_with", "add_rows", "gather", "gather_rows", "largest", "from_first")
_TORCH = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "_broadcast_coalesced")
_watched: set[str] = set()
_training_threads: set[int] = set()
"""The thread that draws batches. What others send meanwhile comes at no certain moment."""


def note(event: str) -> None:
    """Note an event of the thread that trains."""
    if event.startswith("draw"):
        _training_threads.add(threading.get_ident())
    if not _training_threads or threading.get_ident() in _training_threads:
        EVENTS.append(event)


def watch_process() -> None:
    """Note the collectives and the commits of this process, once."""
    for owner, names, prefix in ((Group, _MESH, "mesh"), (dist, _TORCH, "torch")):
        for name in names:
            if f"{prefix}.{name}" not in _watched and hasattr(owner, name):
                _watched.add(f"{prefix}.{name}")
                setattr(owner, name, _noting(f"{prefix}.{name}", getattr(owner, name)))
    if "commit" not in _watched:
        _watched.add("commit")
        count_pending = AverageMeterCollection.count_pending
        AverageMeterCollection.count_pending = _noting("commit", count_pending)  # type: ignore[method-assign]


def watch_parts(models: Any, optimizers: Any) -> None:
    """Note the forward and backward passes of models, and the steps of optimizers."""
    for number, model in enumerate(models):
        model.register_forward_pre_hook(_hook(f"forward {number}"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if trained:
            trained[0].register_hook(_hook(f"gradient {number}"))
    for number, optimizer in enumerate(optimizers):
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(_hook(f"step {number}"))


def collate(rows: Any) -> Any:
    """Note that a batch is drawn."""
    note(f"draw {len(rows)}")
    return torch.utils.data.default_collate(rows)


def events(_: Any) -> list[str]:
    """For `apply_all_operators`: what has happened since the last time, repetitions counted."""
    found = list(EVENTS)
    EVENTS.clear()
    return _shortened(found)


def _noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return function(*args, **kwargs)

    return noting


def _hook(name: str) -> Callable[..., None]:
    return lambda *_: note(name)


def _shortened(found: list[str]) -> list[str]:
    lines: list[str] = []
    for event in found:
        before, _, times = lines[-1].partition(" x ") if lines else ("", "", "")
        if before == event:
            lines[-1] = f"{event} x {int(times or 1) + 1}"
        else:
            lines.append(event)
    return lines
