"""The session of a training function that `fit` runs in a worker: its reports, checkpoints, data, rank and trial."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from raysgd.air.checkpoint import Checkpoint, checkpoint_at
from raysgd.air.reports import UploadOptions
from raysgd.air.session import TrialFacts
from raysgd.air.trial import checkpoint_name
from raysgd.core.cluster.ray_cluster import RayThreads
from raysgd.core.engine.shared.types import World
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import SessionMisuseError
from raysgd.storage import Folder
from raysgd.train._worker.function_replica import Session
from raysgd.train._worker.messages import (
    CheckpointRef,
    FunctionMessage,
    FunctionSpec,
    PendingCheckpoints,
    TrainingResultType,
)
from raysgd.train.constants import METADATA_KEY

_DEEPEST = 50
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.bool_)
logger = logging.getLogger(__name__)
_once = Once()
_MISUSE = "is meant to only be called inside a function that is executed by a Tuner or Trainer"
_FOREIGN = (
    "A function of Ray's own session was called in a function that raysgd runs, where it does nothing. Import "
    "`raysgd.train` instead of `ray.train`, and `raysgd.air.session` instead of `ray.air.session`."
)
_MISUSES = (_MISUSE, "cannot be used outside of a Ray Train training function")


class FitSession(Session):
    """One run of a training function that `fit` started in this worker.

    Args:
        world: This worker's rank and the number of workers.
        spec: The function and how to run it.
        checkpoint: The checkpoint from which the function starts: the object itself, its folder or its content. None to
            start from the beginning.
        shard: This worker's shard of the data, by dataset name.
        pending: Holds large checkpoints until the driver fetches them.
        facts: Facts about the run that the function can query, such as the run's folder and metadata.
    """

    def __init__(
        self,
        world: World,
        spec: FunctionSpec,
        checkpoint: Checkpoint | Folder | dict[str, Any] | None = None,
        shard: Any = None,
        pending: PendingCheckpoints | None = None,
        *,
        facts: TrialFacts,
    ) -> None:
        super().__init__(world, spec, None, shard, pending)
        self.facts = facts
        self._newest = _opened(checkpoint)
        self._is_newest_stored = False
        self._upload: Future[None] | None = None

    def _run(self) -> Any:
        """Run the training function and return its return value, if `Result.return_value` may need it.

        This is the case if the value is plain data and this worker has rank 0 or may get rank 0. Otherwise, return
        None.
        """
        with _working_in(self.facts.workdir), _errors_for_calls_of_ray(), _seen_by_ray(self):
            returned = super()._run()
            self._await_upload()
            return returned if self._may_be_first and is_plain(returned) else None

    def _explained(self, error: Exception) -> Exception:
        """Return an exception with advice if `error` comes from a call to one of Ray's own session functions.

        Handle any other exception as the base class does.
        """
        if not isinstance(error, UserWarning | RuntimeError) or not any(text in str(error) for text in _MISUSES):
            return super()._explained(error)
        return SessionMisuseError(f"{_FOREIGN} Ray says: {error}")

    @property
    def _may_be_first(self) -> bool:
        """True if this worker has rank 0, or may get rank 0 because workers with lower ranks may be lost."""
        return self.world.rank == 0 or self.membership is not None

    def current_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that the function has reported last, or else the checkpoint from which it started."""
        self._await_upload()
        if self._is_newest_stored:
            self.mailbox.await_request()  # the driver commits the checkpoint before it requests the next message
        return self._newest

    def ask(self, name: str, data: Any = None) -> Any:
        """Wait until the last reported checkpoint is stored, then ask the driver a question and return its answer."""
        self._await_upload()
        return super().ask(name, data)

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, options: UploadOptions | None = None) -> None:
        """Send metrics to the driver, optionally with a checkpoint.

        Raises:
            TypeError: `checkpoint` is not a `Checkpoint`.
        """
        metrics = without_tensors(metrics)
        check_checkpoint(checkpoint)
        if self.is_repeating:
            return
        options = options or UploadOptions()
        self._await_upload()
        self.iteration += 1
        # The driver uses only the metrics of rank 0. Workers that cannot get rank 0 therefore send no metrics.
        data = self._packed(self._spec.encode({**metrics, **self._details()})) if self._may_be_first else None
        if checkpoint is None:
            self._send_metrics(data)
        else:
            self._send_with(checkpoint, data, options)

    def _send_with(self, checkpoint: Any, data: Any, options: UploadOptions) -> None:
        """Send metrics with a checkpoint.

        Store a checkpoint folder from this worker, in the background if the user requested this. Send any other
        checkpoint to the driver as a dict. If the run writes no files, send checkpoint folders in this way, too.
        """
        self._is_newest_stored = False
        if checkpoint.uri is not None and self.facts.keeps_files:  # it is a folder
            if options.is_async:
                self._upload = RayThreads().start(lambda: self._store(data, checkpoint, options), "raysgd-upload")
            else:
                self._store(data, checkpoint, options)
            return
        content = checkpoint.to_dict()
        self._newest = Checkpoint.from_dict(content) if options.deletes else checkpoint
        metadata = checkpoint.get_metadata()
        self._send(data, {**content, METADATA_KEY: metadata} if metadata else content)
        self._delete_local(checkpoint, options)

    def _await_upload(self) -> None:
        """Wait until the thread that stores a checkpoint in the background has ended. If it failed, raise its error."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def _delete_local(self, checkpoint: Checkpoint, options: UploadOptions) -> None:
        """Delete the local folder of a reported checkpoint, if the user's options request this.

        Never delete a folder inside the trial's folder, because it may be a stored checkpoint.
        """
        (kind, place), trial = checkpoint.get_internal_representation(), self.facts.folder
        if not options.deletes or kind != "local_path":
            return
        if not (trial.is_local and Path(place).resolve().is_relative_to(trial.local_path.resolve())):
            shutil.rmtree(place, ignore_errors=True)

    def _store(self, data: Any, checkpoint: Checkpoint, options: UploadOptions) -> None:
        """Copy a checkpoint folder to the staging folder that all ranks share, and send the metrics.

        A rank above 0 sends the metrics first. The driver answers with the names of files to leave out, because lower
        ranks have files with the same names.
        """
        name = checkpoint_name(self.mailbox.await_request().index)
        target = self.facts.folder.staged(name)
        with checkpoint.as_directory() as path:
            source = Path(path)
            ref = CheckpointRef(files=names_in(source))
            if self.world.rank == 0:
                if self.membership is not None and self.membership.place.number:
                    target.delete()  # it may contain files of a lost worker, from a checkpoint that was never completed
                target.upload(source)
                self.mailbox.offer(FunctionMessage(TrainingResultType.REPORT, data, ref))
            else:
                self._announce(data, ref, lambda taken: target.upload(source, taken))
        self._delete_local(checkpoint, options)
        self._newest, self._is_newest_stored = checkpoint_at(self.facts.folder / name), True

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of a dataset; see `get_dataset_shard`."""
        shards = self.shard or {}
        if name is not None:
            if name not in shards:
                there = sorted(shards) or "none"
                logger.warning("there is no dataset %r (available: %s), so `None` is returned", name, there)
            return self._part_of(shards.get(name))
        if len(shards) > 1:
            raise RuntimeError(f"There are several datasets: choose one of {sorted(shards)}, with `dataset_name`.")
        return self._part_of(next(iter(shards.values()), None))

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise an error, because a function that `fit` runs saves checkpoints with its reports.

        Raises:
            SessionMisuseError: Always.
        """
        raise SessionMisuseError(
            "`save_checkpoint` belongs to functions that `Trainer.run` runs. In a function that `fit` runs, save with "
            "a report: `report(metrics, checkpoint=Checkpoint.from_dict({...}))`."
        )

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Raise an error, because a function that `fit` runs calls `get_checkpoint` instead.

        Raises:
            SessionMisuseError: Always.
        """
        raise SessionMisuseError(
            "`load_checkpoint` belongs to functions that `Trainer.run` runs. In a function that `fit` runs, call "
            "`get_checkpoint()`, and `to_dict()` or `as_directory()` of what it returns."
        )


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the paths of all files in a folder and its subfolders, relative to the folder, with forward slashes."""
    paths = (Path(above, name) for above, _, names in os.walk(folder, followlinks=True) for name in names)
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def _opened(checkpoint: Checkpoint | Folder | dict[str, Any] | None) -> Checkpoint | None:
    if isinstance(checkpoint, dict):
        return Checkpoint.from_dict(checkpoint)
    return checkpoint_at(checkpoint) if isinstance(checkpoint, Folder) else checkpoint


def check_checkpoint(checkpoint: Any) -> None:
    """Check the checkpoint that a function reports.

    Raises:
        TypeError: `checkpoint` is neither a `Checkpoint` nor None.
    """
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return
    hint = "`Checkpoint.from_dict(...)` makes one" if isinstance(checkpoint, Mapping) else "pass one, or None"
    raise TypeError(f"`checkpoint={checkpoint!r:.200}`: need a `raysgd.air.Checkpoint`; {hint}.")


def without_tensors(metrics: Any, place: str = "metrics") -> Any:
    """Replace tensors in metrics, because a tensor may be on a device that the driver does not have.

    A one-element tensor becomes a number. Any other PyTorch tensor becomes a copy on the CPU, and any other TensorFlow
    tensor becomes a NumPy array.
    """
    if isinstance(metrics, Mapping):
        return {key: without_tensors(value, f"{place}[{key!r}]") for key, value in metrics.items()}
    if isinstance(metrics, list | tuple):
        own = [without_tensors(value, f"{place}[{index}]") for index, value in enumerate(metrics)]
        return metrics if all(here is there for here, there in zip(own, metrics, strict=True)) else own
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(metrics, torch.Tensor):
        value = metrics.item() if metrics.numel() == 1 else metrics.detach().cpu().clone()
    elif tensorflow is not None and tensorflow.is_tensor(metrics):
        value = metrics.numpy().item() if metrics.shape.num_elements() == 1 else metrics.numpy()
    else:
        return metrics
    if _once.is_first("tensors"):
        logger.warning("`%s` is a tensor: a copy of it is reported. Report a number, such as `tensor.item()`", place)
    return value


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return True if a value consists of numbers, strings, None and arrays in lists, tuples and dicts.

    Pickling any other value might run code of a user's class.

    >>> is_plain({"loss": [0.5, None]}), is_plain(object()), is_plain([object()])
    (True, False, False)
    """
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype.kind in "biufcSU"
    if depth < _DEEPEST and kind in (list, tuple, dict):
        items = [*value, *value.values()] if kind is dict else value
        return all(is_plain(item, depth + 1) for item in items)
    return kind in _PLAIN or issubclass(kind, np.number)


@contextmanager
def _working_in(workdir: str | None) -> Iterator[None]:
    """Inside the block, make a folder the working directory of this process. With None, do nothing."""
    if workdir is None:
        yield
        return
    before = os.getcwd()
    os.makedirs(workdir, exist_ok=True)
    os.chdir(workdir)
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(before)


class SessionForRay:
    """Takes the place of Ray's own session, so that `ray.tune.report` and `ray.tune.get_checkpoint` work in `fit` runs.

    Ray's `setup_wandb` reads the names of the trial.

    Args:
        session: Session of the running function, which receives the calls.
    """

    def __init__(self, session: FitSession) -> None:
        self._session = session
        self.world_rank = session.world.rank
        facts = session.facts
        self.trial_id, self.trial_name, self.experiment_name = facts.id, facts.name, facts.experiment_name

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Send metrics to the driver, optionally with a `Checkpoint` object of Ray or raysgd."""
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint.path, checkpoint.filesystem)
        self._session.report(metrics, checkpoint)

    @property
    def loaded_checkpoint(self) -> Checkpoint | None:
        """The checkpoint that `ray.tune.get_checkpoint` returns."""
        return self._session.current_checkpoint()

    def __getattr__(self, name: str) -> Any:
        raise SessionMisuseError(f"{_FOREIGN} `{name}` was requested.")


@contextmanager
def _seen_by_ray(session: FitSession) -> Iterator[None]:
    """Inside the block, let functions such as `ray.tune.report` report to this run.

    Do nothing if a Ray Tune trial runs in this process, because these functions then report to the trial.
    """
    module = sys.modules.get("ray.train._internal.session")
    if module is None or getattr(module, "_session", session) is not None:
        yield
        return
    own = SessionForRay(session)
    module._session = own  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._session = None  # type: ignore[attr-defined]


@contextmanager
def _errors_for_calls_of_ray() -> Iterator[None]:
    """Inside the block, raise an exception where Ray would only warn that its session function has no effect."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{_MISUSE}", UserWarning)
        yield
