"""Creates trainers in this process that repeat the steps of a past run with the user's operator class.

Only the user decides which code runs. The folder of the run provides plain data: the config and the options. Its
checkpoints are in that folder, or in a folder that the user names. A journal may come from a stranger, and name any
path or store: nothing else that it names is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.core.files import is_inside
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.journal.entries import TRAINER_ARGUMENTS, Leg, LoaderLayout
from raysgd.journal.journal import Journal
from raysgd.storage import open_folder
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.configuration import BatchOptions

_FORM = "write `--program train.py:MyOperator`, a file or module and the operator class in it"


def load_class(program: str | type[TrainingOperator]) -> type[TrainingOperator]:
    """Return the operator class that the user names, and import it if necessary.

    Args:
        program: The class, or its location, such as `train.py:MyOperator` or `package.module:MyOperator`.

    Raises:
        ValueError: The class was not found, or is not a `TrainingOperator`.
    """
    if isinstance(program, type):
        found: Any = program
    else:
        place, _, name = program.rpartition(":")
        if not place or not name.isidentifier():
            raise ValueError(f"`--program {program}`: {_FORM}.")
        found = getattr(_module(place, program), name, None)
    if not (isinstance(found, type) and issubclass(found, TrainingOperator)):
        raise ValueError(f"`--program {program}` is no `TrainingOperator` class: {_FORM}.")
    return found


def _module(place: str, program: str) -> Any:
    path = Path(place)
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"`--program {program}`: {error}: {_FORM}.") from error
    if not path.is_file():
        raise ValueError(f"`--program {program}`: there is no file `{place}`.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as Python does for a script, so that the file can import modules in the same folder
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file is there"
    assert spec.loader is not None, "its ending is that of Python"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Program:
    """Creates trainers that repeat the steps of a past run, from the user's operator class and config.

    Args:
        operator: The operator class, or its location, such as "train.py:MyOperator".
        config: Entries that are added to the config in the journal, or replace entries of this config. The journal
            lacks objects and secrets.
        options: Arguments of the trainer, which replace those in the journal. The journal lacks those that can name
            code.

    Raises:
        ValueError: There is no such operator class, or an option cannot be passed again.
    """

    def __init__(
        self,
        operator: str | type[TrainingOperator],
        config: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.operator_cls = load_class(operator)
        self._config, self._options = dict(config or {}), dict(options or {})
        unknown = [name for name in self._options if name not in TRAINER_ARGUMENTS]
        if unknown:
            raise ValueError(f"`options` has {unknown[0]!r}: allowed are {', '.join(TRAINER_ARGUMENTS)}.")

    @contextmanager
    def trainer(self, leg: Leg) -> Iterator[TorchTrainer]:
        """Inside the block, provide a trainer in this process that can repeat the steps of a part of an epoch.

        Args:
            leg: The part of an epoch to repeat. The trainer uses the options of the worker group that ran it.

        Raises:
            ValueError: A single process cannot repeat the steps of this run, or an entry of the config is missing.
        """
        arguments, batch_options = self.arguments_for(leg), batch_options_for(leg)
        # This trainer splits global batches exactly as the workers of the past run did.
        cls = type("TorchTrainer", (TorchTrainer,), {"_divide": lambda trainer, options: batch_options})
        with cls(training_operator_cls=self.operator_cls, use_local=True, **arguments) as trainer:
            yield trainer

    def arguments_for(self, leg: Leg) -> dict[str, Any]:
        """Return the arguments of a trainer in this process that can repeat the steps of a part of an epoch.

        Raises:
            ValueError: A single process cannot repeat these steps, or an entry of the config is missing.
        """
        batch_options, options = batch_options_for(leg), leg.run.options
        missing = [name for name in options.left_out if name not in self._options]
        if missing:
            raise ValueError(
                f"the journal does not hold {', '.join(f'`{name}`' for name in missing)} of the trainer, or it could "
                "name code: pass what the run had with `--options file.json`, or with "
                f"`options={{'{missing[0]}': ...}}` in Python."
            )
        config = {**leg.run.config, **self._config}
        objects = [name for name in leg.run.config_left_out if name not in config]
        if objects:
            raise ValueError(
                f"the journal does not hold the entries {', '.join(map(repr, objects))} of the config, which are "
                "objects or secrets: pass them with `--config file.json`, or with `config={...}` in Python."
            )
        return {
            **{name: getattr(options, name) for name in TRAINER_ARGUMENTS},
            **self._options,
            "split_batches": batch_options.split_batches,
            "micro_batch_size": batch_options.micro_batch_size,
            "deterministic": batch_options.deterministic,
            "use_gpu": "auto" if options.use_gpu else False,
            "config": config,
        }


def options_of(leg: Leg) -> BatchOptions:
    """Return how the global batches of a part of an epoch were split among the workers of the run."""
    options, size = leg.run.options, leg.run.options.micro_batch_size
    if size == "auto":
        size = leg.data.rule.cap if isinstance(leg.data, LoaderLayout) and leg.data.rule is not None else None
    return BatchOptions(options.split_batches, size, options.deterministic, options.num_shards)


def batch_options_for(leg: Leg) -> BatchOptions:
    """Return the batch options with which one process computes the same steps as the workers of a past run.

    Args:
        leg: The part of an epoch that these workers ran.

    Raises:
        ValueError: One process cannot compute the same steps.
    """
    options, num_workers, batch_options = leg.run.options, leg.num_workers, options_of(leg)
    for applies, what in (
        (options.strategy != "ddp", f'`strategy="{options.strategy}"`'),
        (options.use_horovod, '`backend="horovod"`'),
        (options.precision == "apex" or options.use_fp16 == "apex", "Apex"),
    ):
        if applies:
            raise ValueError(f"a run with {what} cannot be replayed, because one process does not take its steps.")
    if batch_options.is_global or num_workers == 1:
        return replace(batch_options, num_shards=batch_options.num_shards if batch_options.deterministic else 1)
    # Each worker had its own batch. The single process treats these batches as the shards of one global batch.
    if leg.window > 1:
        raise ValueError(
            f"the run had {num_workers} workers with `accumulate_grad_batches={leg.window}` and without "
            "`split_batches=True`, with which one process could take these steps."
        )
    return BatchOptions(deterministic=True, num_shards=num_workers)


def checkpoint_in_run(journal: Journal, step: int) -> Path | None:
    """Return the path of the checkpoint that was saved after a step, which may have been deleted.

    Return None if the journal names a store, or a path that leads out of the folder of the run, also through a link.
    """
    # An absolute path, because `open_folder` and Arrow would take a relative path such as `s3:/name` for a URI.
    path = Path(os.path.abspath(journal.folder)) / journal.checkpoints[step]
    return path if "://" not in journal.checkpoints[step] and _stays_inside(path, journal.folder) else None


def _stays_inside(path: Path, folder: Path) -> bool:
    """Return True if a checkpoint is in a folder after all links. So must be the files of a checkpoint in parts."""
    return all(is_inside(each, folder) for each in (path, *(path.iterdir() if path.is_dir() else ())))


def nearest_checkpoint(
    journal: Journal, step: int, folder: str | os.PathLike[str] | None = None, *, only_inside: bool = False
) -> tuple[int, str | None]:
    """Return the newest checkpoint from before a step: the step after which it was saved, and its path or URI.

    Skip checkpoints whose files were deleted. Return 0 and None if there is no such checkpoint.

    Args:
        journal: The journal of the run.
        step: Number of the step.
        folder: Path or URI of the folder with the checkpoints. Default: they are in the folder of the run.
        only_inside: True to skip checkpoints that are not in the folder of the run. Otherwise, the user has to say
            where they are.

    Raises:
        ValueError: The newest checkpoint is not in the folder of the run, and the user named no other folder. Or it is
            a link out of the folder that the user named.
        StorageError: The storage is unreachable.
    """
    before = [at for at in sorted(journal.checkpoints, reverse=True) if at < step]
    if folder is not None:
        opened = open_folder(folder, argument="checkpoints")
        if not opened.exists():
            raise ValueError(f"`checkpoints={masked(str(folder))!r}`: there is no such folder.")
        names = set(opened.names())
        named = ((at, journal.checkpoints[at].rpartition("/")[2].partition("?")[0]) for at in before)
        at, place = next(((at, opened / name) for at, name in named if name in names), (0, None))
        if place is None or not place.is_local:
            return at, None if place is None else place.uri
        if not _stays_inside(place.local_path, opened.local_path):
            raise ValueError(
                f"`{place}`, or a file in it, is a link out of its folder. Pass the folder to which it leads with "
                "`--checkpoints`."
            )
        return at, place.path
    for at in before:
        path = checkpoint_in_run(journal, at)
        if path is None and not only_inside:
            where = printable(masked(journal.checkpoints[at]).partition("?")[0])
            raise ValueError(
                f"the checkpoint of step {at} is not in the folder of the run, but at `{where}`. To read it, pass its "
                "folder with `--checkpoints FOLDER`, or with `checkpoints=...` in Python."
            )
        if path is not None and os.path.exists(path):
            return at, str(path)
    return 0, None
