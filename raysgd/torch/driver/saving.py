"""Files of a `TorchTrainer`: what it writes, in each of its formats, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from raysgd import _arguments as checks
from raysgd.driver.keeping import FileSaves
from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.engine.snapshots import Snapshot
from raysgd.storage import files
from raysgd.torch.checkpoints import checkpoint_file, divided_folder, shared_state, weights_file
from raysgd.torch.driver import partial_loading
from raysgd.torch.driver.partial_loading import LoadReport
from raysgd.torch.driver.state_loader import StateLoader
from raysgd.torch.hosting.replica_state import as_in_file
from raysgd.torch.objects.rng import RNG
from raysgd.torch.torch_runner import TorchRunner
from raysgd.worker.state.replica_state import RESUME

FileFormat = Literal["torch", "safetensors"]
Writer = Callable[[str, dict[str, Any]], object]


def check_format(name: Any) -> None:
    """Refuses an unknown format, and one whose package is missing.

    Raises:
        ValueError: It is unknown.
        ImportError: safetensors is not installed.
    """
    if name not in ("torch", "safetensors"):
        guess = checks.did_you_mean(str(name), ("torch", "safetensors"))
        raise ValueError(f'`format={name!r}`: allowed are "torch" and "safetensors".{guess}')
    if name == "safetensors":
        weights_file.check_writable()


def content_of(snapshot: Snapshot, weights_only: bool, file_format: FileFormat) -> tuple[dict[str, Any], Writer]:
    """Return what a file is to hold, as views of the snapshot, and what writes it.

    Raises:
        ValueError: Something in it could not be loaded back.
    """
    state = as_in_file(shared_state.whole(snapshot.shared_state, copy=False))
    if file_format == "safetensors":
        return {"models": state["models"]}, weights_file.write
    state[RESUME][RNG] = list(snapshot.rank_states)
    return checkpoint_file.packed(state, allow_pickle=not weights_only), checkpoint_file.write


def save_folder(controller: ElasticController, checkpoint: Any, weights_only: bool) -> None:
    """Let each worker write its part into a folder.

    Raises:
        ValueError: Something in the state could not be loaded back.
        OSError: The folder could not be written.
    """
    with files.state_is_kept(), divided_folder.making(checkpoint) as folder:

        def arguments(worlds: Sequence[World]) -> list[tuple[str]]:
            return [(divided_folder.emptied(folder),)] * len(worlds)

        parts = controller.run(Call(TorchRunner.write_part, arguments))
        rest = as_in_file(parts[0].rest)
        rest[RESUME] = {**rest[RESUME], RNG: [part.own for part in parts]}
        divided_folder.finish(folder, parts, checkpoint_file.packed(rest, allow_pickle=not weights_only))


def load(
    checkpoint: Any,
    weights_only: bool,
    parts: tuple[str, ...] | None,
    strict: bool,
    controller: ElasticController,
    saves: FileSaves,
    take_snapshot: Callable[[], Snapshot],
) -> LoadReport | None:
    """Load a file or a folder into all workers.

    Args:
        checkpoint: The path or the URI.
        weights_only: Whether to refuse what could run code.
        parts: Which parts of the state; None for all.
        strict: Whether all weights have to fit.
        controller: Has the workers.
        saves: Notes the file.
        take_snapshot: Takes the state as it is now, of which the rest stays when only a part is loaded.

    Returns:
        What was loaded and what did not fit, if only a part was loaded; else None.
    """
    loader, name = StateLoader(controller), files.shown(checkpoint)
    with ExitStack() as held:
        path = held.enter_context(files.local_copy(checkpoint))
        if parts is None and divided_folder.is_folder(path):
            loader.load_folder(path, weights_only)
            return None
        report = None
        if parts or weights_file.is_weights_file(path):
            saved = partial_loading.read(path, name, weights_only, held)
            state, report = partial_loading.merged(take_snapshot(), saved, parts, strict)
            loader.load(state)
        else:
            file = held.enter_context(checkpoint_file.mapped(path, weights_only=weights_only, name=name))
            loader.load_file(file, weights_only, held)
    saves.note_file(name)
    return report
