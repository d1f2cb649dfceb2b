"""How a `TorchTrainer` saves and loads: what it writes, in each of its formats, and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from raysgd._arguments import checks
from raysgd.driver.changing import ChangingTrainer
from raysgd.engine.processes.snapshots import Snapshot
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
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
    """What a file is to hold, as views of the snapshot, and what writes it.

    Raises:
        ValueError: Something in it could not be loaded back.
    """
    state = as_in_file(shared_state.whole(snapshot.shared_state, copy=False))
    if file_format == "safetensors":
        return {"models": state["models"]}, weights_file.write
    state[RESUME][RNG] = list(snapshot.rank_states)
    return checkpoint_file.check_loadable(state, allow_pickle=not weights_only), checkpoint_file.write


class SavingTrainer(ChangingTrainer):
    """A trainer with files of PyTorch."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state: epoch, operator, models, optimizers, schedulers, and of mixed precision."""
        state = shared_state.whole(self._snapshot().shared_state, copy=True)
        del state[RESUME]
        return dict(state)

    def _load_state(self, state: dict[str, Any]) -> None:
        StateLoader(self._controller).load(state)

    def save(
        self,
        checkpoint: Any,
        blocking: bool = True,
        weights_only: bool = True,
        format: FileFormat = "torch",
        *,
        whole: bool = False,
    ) -> Any:
        """Writes the state to a file of the driver, atomically, with a checksum. `torch.load` reads it too.

        With `parallel="fsdp"` it writes a folder, in which each worker has a file: no process needs the whole state.
        All workers and the driver have to see its path. `load` reads it into any number of workers.

        Args:
            checkpoint: The path, or the URI of a file in a store, such as `s3://bucket/last.pt`.
            blocking: False returns once the state is copied; it is sent and written in the background, and an error is
                raised by the next `save` or by `shutdown`. If the worker that has the copy is lost meanwhile, the file
                is not written: the log says so, and `shutdown` raises if no later `save` has made up for it.
            weights_only: False lets the operator's own state hold any object; such a file needs `load(...,
                weights_only=False)`.
            format: "torch" for the whole state, "safetensors" for the weights of the models alone.
            whole: Whether to gather divided models in the driver and write one file. So it is in any case with
                "safetensors", and with a URI. A folder is written when `save` returns, also without `blocking`.

        Returns:
            `checkpoint`.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: The operator's own state could not be loaded back; the message names the key. Or the URI is
                not one of a file.
            OSError: The file could not be written; a `StorageError` for a URI. The state is kept.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(blocking=blocking, weights_only=weights_only, whole=whole)
        check_format(format)
        if self._facts.is_sharded and format == "torch" and not (whole or files.is_uri(checkpoint)):
            self._save_folder(checkpoint, weights_only)
            return checkpoint
        content = partial(content_of, weights_only=weights_only, file_format=format)
        if blocking:
            self._saves.write(checkpoint, content(self._snapshot()))
        else:
            self._saves.submit(checkpoint, self._newest_snapshot(), content, self)
        return checkpoint

    def _save_folder(self, checkpoint: Any, weights_only: bool) -> None:
        """Lets each worker write its part into a folder."""
        self._writer.wait()  # an earlier file of this name may be on its way
        with files.state_is_kept(), divided_folder.making(checkpoint) as folder:

            def arguments(worlds: Sequence[World]) -> list[tuple[str]]:
                return [(divided_folder.emptied(folder),)] * len(worlds)

            parts = self._controller.run(Call(TorchRunner.write_part, arguments))
            rest = as_in_file(parts[0].rest)
            rest[RESUME] = {**rest[RESUME], RNG: [part.own for part in parts]}
            divided_folder.finish(folder, parts, checkpoint_file.check_loadable(rest, allow_pickle=not weights_only))

    def load(
        self, checkpoint: Any, weights_only: bool = True, *, strict: bool = True, parts: Sequence[str] | None = None
    ) -> LoadReport | None:
        """Loads what `save` wrote, a file or a folder, or a file of the old library, into all workers.

        Args:
            checkpoint: The path or the URI. A file of safetensors has models only, and the rest stays as it is.
            weights_only: False also unpickles arbitrary objects. Only for files that you trust.
            strict: False loads the weights that fit by name and shape, and by default nothing else.
            parts: What to load of the file, the rest stays as it is: some of "models", "criterion", "optimizers",
                "schedulers", "precision", "operator", "progress". Default: all, and with `strict=False` the models.

        Returns:
            What was loaded and what did not fit, if only a part was loaded; else None.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: A store could not be reached. An `OSError`.
            CheckpointCorruptedError: The file is truncated or was changed.
            ValueError, KeyError: The file does not fit; the workers are as they were.
        """
        files.check_location("checkpoint", checkpoint)
        checks.refuse_text(weights_only=weights_only)
        chosen = partial_loading.checked_parts(parts, strict)
        with ExitStack() as held:
            path = held.enter_context(files.local_copy(checkpoint))
            name = files.shown(checkpoint)
            if chosen is None and divided_folder.is_folder(path):
                StateLoader(self._controller).load_folder(path, weights_only)
                return None
            if chosen or weights_file.is_weights_file(path):
                saved = partial_loading.read(path, name, weights_only, held)
                state, report = partial_loading.merged(self._snapshot(), saved, chosen, strict)
                StateLoader(self._controller).load(state)
                self._saves.note_file(name)
                return report
            file = held.enter_context(checkpoint_file.mapped(path, weights_only=weights_only, name=name))
            StateLoader(self._controller).load_file(file, weights_only, held)
        self._saves.note_file(name)
        return None
