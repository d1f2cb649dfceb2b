"""What one rank has of the state of divided models: written to a folder, and taken over from one.

Each rank reads and writes its part alone; no process needs the whole state. The files are in
`raysgd.torch.checkpoints.divided_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from raysgd.torch.checkpoints import divided_files
from raysgd.torch.checkpoints.divided_files import DividedFolder
from raysgd.torch.checkpoints.divided_folder import StateInFolder, WrittenPart, split
from raysgd.torch.checkpoints.divided_index import Path_
from raysgd.torch.objects.plain_names import plain, with_plain_names

if TYPE_CHECKING:
    from raysgd.torch.hosting.replica_state import TorchState
    from raysgd.torch.operator.registrar import Registered
    from raysgd.torch.parallel.strategy import NoParallel


def write(folder: str, state: TorchState, parallel: NoParallel) -> WrittenPart:
    """Writes this rank's part of the state into a folder; all ranks do this at the same time.

    Returns:
        What the driver needs to know.
    """
    rest, tensors = split(state.read_divided())
    rank = dist.get_rank()
    files, stored = divided_files.write_part(folder, tensors, rank, parallel.group_beside)
    return WrittenPart(None if rank else rest, state.own(), stored, files)


def read(place: StateInFolder, state: TorchState, parallel: NoParallel) -> Mapping[str, Any]:
    """The state in a folder, divided as it is here; nothing is changed. All ranks do this at the same time.

    Raises:
        CheckpointCorruptedError: The folder is damaged; on every rank.
        ValueError, KeyError: The state does not fit.
    """
    folder = divided_files.opened(place.path, place.weights_only, for_rank=True)
    outline = folder.outline()
    state.check(outline)
    _together(folder, parallel, lambda: folder.check(dist.get_rank(), dist.get_world_size()))
    tensors = room_for(outline, [each.path for each in folder.tensors], state, parallel)
    _together(folder, parallel, lambda: folder.read_into(tensors))
    return folder.joined(tensors)


def _together(folder: DividedFolder, parallel: NoParallel, read: Callable[[], None]) -> None:
    """Lets each rank do its share. Where one cannot, all ranks raise, so that none waits for others."""
    found: Exception | None = None
    try:
        read()
    except Exception as error:
        found = error
    verdict = torch.tensor([found is not None], dtype=torch.uint8)
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group=parallel.group_beside)
    if found is not None or verdict.item():
        told = found or folder.corrupted("a file is missing, cannot be read, or was changed, another worker says")
        raise told.with_traceback(None)  # on every rank from this line: workers that failed alike are kept


def room_for(
    outline: Mapping[str, Any], paths: Sequence[Path_], state: TorchState, parallel: NoParallel
) -> dict[Path_, torch.Tensor]:
    """Tensors to fill with what this rank has of a state.

    Args:
        outline: The state, with tensors that have a shape and no memory.
        paths: Where the tensors belong.
        state: What they are divided like.
        parallel: Divides them.
    """
    like = _Like(state.registered, state.criterion, state.optimizers_as_in(outline), outline)
    return {path: parallel.empty_like(like.tensor(path), _at(outline, path).dtype) for path in paths}


def _at(state: Any, path: Path_) -> Any:
    for step in path:
        state = state[step]
    return state


@dataclass(frozen=True)
class _Like:
    """What a tensor of a state is here."""

    registered: Registered
    criterion: Any
    optimizers: list[Any]
    outline: Mapping[str, Any]

    def tensor(self, path: Path_) -> torch.Tensor:
        """One with the shape, divided as that one is to be."""
        size = _at(self.outline, path).shape
        own = self._owner(path)
        return own if isinstance(own, DTensor) and own.shape == size else torch.empty(size)

    def _owner(self, path: Path_) -> Any:
        part, *rest = path
        if part == "models":
            return self._in(self.registered.original_models[int(rest[0])], rest[1])
        if part == "criterion":
            return self._in(self.criterion, rest[0])
        return self._parameter(rest) if rest[1] == "state" else None

    def _in(self, model: torch.nn.Module, name: Any) -> Any:
        return with_plain_names(model.state_dict()).get(plain(str(name)))

    def _parameter(self, rest: list[Any]) -> Any:
        """That of an optimizer's state: entries are by the index of the parameter."""
        number, _, index, *_ = rest
        saved = self.outline["optimizers"][number]["param_groups"]
        own = self.optimizers[number].param_groups
        indices = [each for group in saved for each in group["params"]]
        parameters = [each for group in own for each in group["params"]]
        return dict(zip(indices, parameters, strict=True)).get(index)
