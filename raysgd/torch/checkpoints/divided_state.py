"""One rank's part of the state of divided models: written to a folder, and taken over from one.

Each rank reads and writes its part alone; no process needs the whole state. The files are in
`raysgd.torch.checkpoints.divided_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from raysgd.torch.checkpoints import divided_files
from raysgd.torch.checkpoints.divided_files import DividedFolder
from raysgd.torch.checkpoints.divided_folder import MakeRoom, StateInFolder, WrittenPart, split


def write(folder: str, state: Mapping[str, Any], own: Any, group: Any) -> WrittenPart:
    """Writes this rank's part of the state into a folder; all ranks do this at the same time.

    Args:
        folder: The folder.
        state: The state with what this rank has of divided tensors.
        own: What the rank has for itself.
        group: A process group of all ranks, for small tensors in host memory.

    Returns:
        What the driver needs to know.
    """
    rest, tensors = split(state)
    rank = dist.get_rank()
    files, stored = divided_files.write_part(folder, tensors, rank, group)
    return WrittenPart(None if rank else rest, own, stored, files)


def read(place: StateInFolder, make_room: MakeRoom, group: Any) -> Mapping[str, Any]:
    """The state in a folder, divided as it is here; nothing is changed. All ranks do this at the same time.

    Args:
        place: The folder.
        make_room: Makes the tensors that this rank has of a state.
        group: A process group of all ranks, for small tensors in host memory.

    Raises:
        CheckpointCorruptedError: The folder is damaged; on every rank.
        ValueError, KeyError: The state does not fit.
    """
    folder = divided_files.opened(place.path, place.weights_only, for_rank=True)
    tensors = make_room(folder.outline(), [each.path for each in folder.tensors])
    _together(folder, group, lambda: folder.check(dist.get_rank(), dist.get_world_size()))
    _together(folder, group, lambda: folder.read_into(tensors))
    return folder.joined(tensors)


def _together(folder: DividedFolder, group: Any, read: Callable[[], None]) -> None:
    """Lets each rank do its share. Where one cannot, all ranks raise, so that none waits for others."""
    found: Exception | None = None
    try:
        read()
    except Exception as error:
        found = error
    verdict = torch.tensor([found is not None], dtype=torch.uint8)
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
    if found is not None or verdict.item():
        told = found or folder.corrupted("a file is missing, cannot be read, or was changed, another worker says")
        raise told.with_traceback(None)  # on every rank from this line: workers that failed alike are kept
