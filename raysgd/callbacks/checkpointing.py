"""`Checkpointing`: a callback that saves checkpoints during training, and keeps the newest and the best of them."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.callbacks import sidecar
from raysgd.callbacks.callback import Run, WritesFiles
from raysgd.callbacks.early_stopping import Mode, WatchedMetric
from raysgd.core import arguments as checks
from raysgd.core.files import inside
from raysgd.core.numbers.ranking import MAX, BestCheckpoints, SavedCheckpoint
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.exceptions import RaySGDError, StorageError
from raysgd.storage import Folder, open_folder

if TYPE_CHECKING:
    from raysgd.storage.background_writer import SubmittedWrite

logger = logging.getLogger(__name__)

INDEX_FILE = "checkpoints.json"
END = "end"
"""Key in the index file (`checkpoints.json`) for how the run ended.

The value is null while the run is active. It stays null if the program is killed.
"""


Saved = SavedCheckpoint[str]
"""One checkpoint. `number` is a pair: the number of completed epochs, and the number of batches in the next epoch.
`content` is the name of the file."""


class Checkpointing(WritesFiles):
    """Saves the training state of a `TorchTrainer` or `TFTrainer` to files, on disk or in object storage.

    The files are named `epoch_0001.ckpt` and so on, and `trainer.load` reads them. Each file is written atomically. A
    small file beside each checkpoint holds the history of the run and the states of all callbacks.
    `trainer.fit(..., resume_from="auto")` resumes from the newest checkpoint in `folder`.

    A run does not begin if the folder is not writable. If a save fails later, for example because the disk is full, the
    callback logs a warning, training continues, and the next epoch is saved instead. After `max_failures` consecutive
    failures, the run ends with an error, but the trainer keeps its state.

    Args:
        folder: A path or a URI, such as `s3://bucket/run`. Default: `checkpoints` in the run's folder. To resume from
            the default, pass the same `folder` to `fit`.
        every_n_epochs: Number of epochs between saves. The last epoch is always saved, unless the run fails.
        every_n_steps: Also save inside epochs, whenever a worker has trained on this many more batches, counted over
            all epochs. For example, `epoch_0002_step_000120.ckpt` holds the state after two epochs and 120 batches of
            the third. For `TorchTrainer`.
        every_minutes: Also save inside epochs, at the first step after this many minutes without a save. For
            `TorchTrainer`.
        blocking: False lets training continue while a file is written. The next save, and the end of the run, wait for
            the write to finish. Older files are deleted only once the new file is complete, so the folder temporarily
            holds one extra file.
        keep_last: How many of the newest files to keep, or None to keep all.
        keep_best: How many of the best files to keep in addition. Default: 1 with a `metric`, otherwise 0.
        metric: Metric that decides which files are best, such as "val_loss". An epoch without this metric is never the
            best. A file that is saved inside an epoch can only be among the best if a validation ran at the same step
            (see `validate_every_n_steps` of `fit`).
        mode: "min" if low values of the metric are best, "max" if high values are. "auto" infers it from the name:
            "max" for an accuracy, "min" for a loss. For other names it uses "min" and logs a warning.
        max_failures: Number of consecutive failed saves after which the run ends with an error. With 1, the first
            failure ends the run. With None, failures never end the run.
        restore_best_at_end: Whether to load the best file into the trainer when the run ends without an error.

    Raises:
        ValueError, TypeError: An argument is invalid.
        CallbackError: During a run, the results have no such metric, or `max_failures` saves in a row have failed.

    Examples:
        >>> saving = Checkpointing("runs/digits", keep_last=2, keep_best=1, metric="val_accuracy")
    """

    runs_last = True
    _argument = "folder"

    @checks.answer_mistakes('`Checkpointing("checkpoints", keep_last=2)`', shown="Checkpointing")
    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        blocking: bool = True,
        keep_last: int | None = 1,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Mode = "auto",
        max_failures: int | None = 3,
        restore_best_at_end: bool = False,
    ) -> None:
        self._given = self._own_folder = open_folder(folder, argument="folder") if folder is not None else None
        self.every_n_epochs = checks.check_count("every_n_epochs", every_n_epochs, "1 saves every epoch.")
        self.every_n_steps = _count_or_none("every_n_steps", every_n_steps, "None saves between epochs only.")
        self.every_minutes = every_minutes
        if every_minutes is not None:
            checks.check_seconds("every_minutes", every_minutes, may_be_least=False)
        self._pauses = every_n_steps is not None or every_minutes is not None
        self.keep_last = _count_or_none("keep_last", keep_last, "None keeps all; `resume_from` needs the newest.")
        self.max_failures = _count_or_none("max_failures", max_failures, "None never ends the run.")
        self._metric = WatchedMetric("Checkpointing", metric, mode) if metric is not None else None
        if keep_best is None:
            keep_best = 0 if self._metric is None else 1
        if not checks.is_integer(keep_best) or keep_best < 0:
            raise ValueError(f"`keep_best={keep_best!r}`: need a number of files, 0 or more.")
        if keep_best and self._metric is None:
            raise ValueError(f"`keep_best={keep_best}` needs a `metric`, such as `metric='val_loss'`.")
        self.keep_best = int(keep_best)
        checks.refuse_text(restore_best_at_end=restore_best_at_end, blocking=blocking)
        self.blocking = bool(blocking)
        self.restore_best_at_end = bool(restore_best_at_end)
        if self.restore_best_at_end and not self.keep_best:
            raise ValueError("`restore_best_at_end=True` needs a `metric` and `keep_best` of 1 or more.")
        order = self._metric.mode if self._metric is not None else MAX
        self._rule = BestCheckpoints(self.keep_best, order, num_newest=self.keep_last)
        self._current = self._given
        self._saved: list[Saved] = []
        self._in_flight: tuple[Saved, SubmittedWrite, Callable[[], None]] | None = None
        self._is_loaded = False

    # ---------------------------------------------------------------------------------------------- the checkpoints

    @property
    def newest(self) -> str | None:
        """Path or URI of the newest complete checkpoint of the run, or None before the first checkpoint."""
        complete = self._complete
        return self._location(complete[-1].content) if complete else None

    @property
    def best(self) -> str | None:
        """Path or URI of the best checkpoint by `metric`, or None if no checkpoint has a value for the metric."""
        best = self._best()
        return self._location(best.content) if best is not None else None

    @property
    def best_score(self) -> float | None:
        """Value of `metric` for the best checkpoint, or None if no checkpoint has a value for the metric."""
        best = self._best()
        return best.score if best is not None else None

    def left_behind(self, run: Run) -> str | None:
        return None if self.newest is None else f"newest checkpoint: {self.newest}"

    def newest_checkpoint(self, run: Run) -> str | None:
        """Return the path or URI of the newest checkpoint in the folder, for `resume_from="auto"`.

        The checkpoint may come from an earlier process. Return None if the folder has no checkpoint that its index file
        lists.

        Raises:
            StorageError: The storage is unreachable.
        """
        self._current = self._folder_of(run)
        present = set(self._folder.names())
        present_entries = [each for each in self._indexed() if each.content in present]
        self._saved = present_entries  # `load_state_dict` replaces this list, unless the file beside is missing
        return self._location(present_entries[-1].content) if present_entries else None

    # ------------------------------------------------------------------------------------------------ the run

    def _check_run(self, run: Run) -> None:
        super()._check_run(run)
        if self._metric is not None:
            self._metric.check_run(run)

    def on_run_begin(self, run: Run) -> None:
        """Prepare the folder, and check it for checkpoints of an earlier run.

        Raises:
            NotImplementedError: This is the run of a training function.
            StorageError: The folder cannot be read or written.
        """
        if run.trainer is None:
            raise NotImplementedError(
                "`Checkpointing` is for class-based trainers. A function saves its own checkpoints; `CheckpointConfig` "
                "or `CheckpointStrategy` says which ones are kept."
            )
        self._saved_at = time.monotonic()
        folder = self._folder_of(run)
        is_new = not (run.epoch or run.step or self._is_loaded)  # a run can be resumed before its first step, too
        if folder != self._current or is_new:
            self._saved = []
        self._is_loaded = False
        self._current, self._num_failures, self._in_flight = folder, 0, None
        self._unsaved: tuple[int, int] | None = None
        self._scores: dict[tuple[int, int], float | None] = {}
        self._end: str | None = None
        try:
            self._look_around()
        except OSError as error:
            raise StorageError(
                f"`folder={masked(str(folder))!r}` cannot be written to: {error}. Pass a folder where you may write."
            ) from error

    def on_epoch_trained(self, run: Run) -> None:
        """If validation runs concurrently with training, save the epoch now if a save is due.

        The result of the validation arrives one epoch later.
        """
        self._finish_write(run, waits=False)
        if run.validates_beside:
            self._save_epoch(run)

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Remember the metric of a validation inside an epoch, in case a file is saved at the same step."""
        if self._metric is not None:
            self._scores[run.epoch, run.step] = self._metric.value_inside(run, metrics)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Save the epoch if `every_n_epochs` requires this, or if the last save has failed.

        If validation runs concurrently with training, `on_epoch_trained` has already saved the epoch if a save was due.
        In this case, only store its metric.
        """
        epoch = run.epoch, 0
        self._scores = {number: score for number, score in self._scores.items() if number >= epoch}
        if self._metric is not None:
            self._scores[epoch] = self._metric.value_in(result)
        if not run.validates_beside:
            self._save_epoch(run)
            return
        self._finish_write(run)
        score = self._scores.get(epoch)
        self._keep_some_of(run, [replace(each, score=score) if each.number == epoch else each for each in self._saved])

    def _save_epoch(self, run: Run) -> None:
        self._unsaved = run.epoch, 0
        if run.epoch % self.every_n_epochs == 0 or self._num_failures:
            self._save(run, self._unsaved, blocking=self.blocking)

    def _pause_at(self, global_step: int) -> int | None:
        self._paused_at, every = global_step, self.every_n_steps
        return None if every is None else (global_step // every + 1) * every

    def _pauses_now(self) -> bool:
        return self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def _on_pause(self, run: Run, global_step: int) -> None:
        every = self.every_n_steps
        is_due = every is not None and global_step // every > self._paused_at // every
        if is_due or self._pauses_now():
            self._save_here(run, blocking=self.blocking)
        else:
            self._finish_write(run, waits=False)

    def on_leave(self, run: Run) -> None:
        """Save the training state with which the run stops, unless this state has been saved already."""
        self._save_here(run)

    def _save_here(self, run: Run, *, blocking: bool = True) -> None:
        self._finish_write(run)
        number = run.epoch, run.step
        if self._saved and self._saved[-1].number == number:
            return
        self._save(run, number, blocking=blocking)
        self._unsaved = None

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Write to the index file how the run ended.

        If the run succeeded, also save its last epoch unless this epoch is already saved, and load the best checkpoint
        if requested.
        """
        self._end = _end_in_words(run, error)
        self._finish_write(run)
        if error is None and self._unsaved is not None:
            self._save(run, self._unsaved)
        else:
            self._update_index(self._saved or self._indexed())
        best = self.best
        if error is None and self.restore_best_at_end and best is not None:
            run.trainer.load(best)  # type: ignore[union-attr]

    def _save(self, run: Run, number: tuple[int, int], *, blocking: bool = True) -> None:
        self._finish_write(run)
        new = SavedCheckpoint(number, self._scores.get(number), _name_of(*number))
        before = self._saved
        others = [each for each in before if each.number != number]
        # `run.save` also stores this list, as this callback's state, in the file beside the checkpoint. If a checkpoint
        # is written in the background, older checkpoints stay in the list until the new checkpoint is complete.
        self._saved, dropped = self._divide(run, [*others, new]) if blocking else ([*others, new], [])
        try:
            self._folder.make()
            if blocking:
                run.save(self._location(new.content))
            else:
                assert run._save_behind is not None, "it is a run of a class-based trainer"
                self._in_flight = new, *run._save_behind(self._location(new.content))
            self._write_index(self._saved)
        except OSError as error:
            self._saved = before
            if len(others) == len(before):
                self._delete(new)  # the checkpoint may have been written, but not the file with the history beside it
            self._fail(new, error)
            return
        self._unsaved, self._saved_at = None, time.monotonic()
        if blocking:
            self._num_failures = 0
        for each in dropped:
            self._delete(each)

    def _finish_write(self, run: Run, *, waits: bool = True) -> None:
        """If a checkpoint is being written in the background, wait for it, and delete the files that it replaces.

        If the checkpoint could not be written, log a warning, or end the run after too many failures. If `waits` is
        False and the checkpoint is still being written, do nothing.
        """
        if self._in_flight is None or not (waits or self._in_flight[1].is_done):
            return
        (new, write, note), self._in_flight = self._in_flight, None
        try:
            write.wait()
            note()
        except (OSError, RaySGDError) as error:  # the storage failed, or the worker that held the state was lost
            self._saved = [each for each in self._saved if each.number != new.number]
            self._delete(new)
            self._update_index(self._saved)
            self._fail(new, error)
            return
        self._num_failures = 0
        self._keep_some_of(run, self._saved)

    def _fail(self, new: Saved, error: OSError | RaySGDError) -> None:
        self._num_failures += 1
        is_over = self.max_failures is not None and self._num_failures >= self.max_failures
        logger.warning(
            "Checkpointing: could not save %s in %s (%d in a row): %s: %s. The trainer keeps its state%s",
            _in_words(new),
            self._folder,
            self._num_failures,
            type(error).__name__,
            error,
            "; the run ends" if is_over else "; the next epoch is saved instead",
        )
        if is_over:
            raise error

    def _delete(self, saved: Saved) -> None:
        as_folder = self._folder / saved.content  # it is a folder if the models are sharded over the workers
        try:
            if as_folder.is_local and as_folder.local_path.is_dir():
                as_folder.delete()
            else:
                self._folder.remove(saved.content)
            self._folder.remove(f"{saved.content}{sidecar.ENDING}")
        except OSError as error:
            logger.warning("Checkpointing: could not delete %s in %s: %s", saved.content, self._folder, error)

    # ------------------------------------------------------------------------------------------- the files to keep

    def _divide(self, run: Run, saved: list[Saved]) -> tuple[list[Saved], list[Saved]]:
        """Return the saved checkpoints to keep, and the saved checkpoints to delete.

        Checkpoints whose validation is still running are kept, because they may turn out to be the best.
        """
        last_told = (run._last_told or 0) if run.validates_beside and self.keep_best else math.inf
        unrated = [each.number for each in saved if each.score is None]
        waiting = [(epoch, step) for epoch, step in unrated if not step and epoch > last_told]
        return self._rule.divide(saved, waiting)

    def _keep_some_of(self, run: Run, saved: list[Saved]) -> None:
        """Store the list of saved checkpoints, without those that are not kept, and delete their files."""
        before = self._saved
        self._saved, dropped = self._divide(run, saved)
        if self._saved != before:
            self._update_index(self._saved)
        for each in dropped:
            self._delete(each)

    @property
    def _complete(self) -> list[Saved]:
        """All saved checkpoints, except one that is still being written in the background."""
        coming = None if self._in_flight is None else self._in_flight[0].number
        return [each for each in self._saved if each.number != coming]

    def _best(self) -> Saved | None:
        scored = [each for each in self._complete if each.score is not None and not math.isnan(each.score)]
        best = self._rule.best(scored)
        return best[-1] if best else None

    def state_dict(self) -> dict[str, Any]:
        """Return the list of checkpoints that this run has saved and kept."""
        return _as_state(self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the list of checkpoints of an earlier run, which this run continues in the same folder."""
        self._saved, self._is_loaded = _read(state), True

    # ------------------------------------------------------------------------------------------------ the folder

    @property
    def _folder(self) -> Folder:
        assert self._current is not None, "nothing is saved before a run"
        return self._current

    def _folder_of(self, run: Run) -> Folder:
        return self._given if self._given is not None else open_folder(inside(run.folder, "checkpoints"))

    def _location(self, name: str) -> str:
        return str(self._folder.local_path / name) if self._folder.is_local else (self._folder / name).uri

    def _write_index(self, saved: list[Saved]) -> None:
        self._folder.write(INDEX_FILE, json.dumps({**_as_state(saved), END: self._end}, indent=1).encode())

    def _update_index(self, saved: list[Saved]) -> None:
        """Write the index file, which lists the checkpoints.

        A failure is only logged, because the next save writes the index file again.
        """
        try:
            self._write_index(saved)
        except OSError as error:
            logger.warning("Checkpointing: could not write %s in %s: %s", INDEX_FILE, self._folder, error)

    def _indexed(self) -> list[Saved]:
        """Return the checkpoints that the index file lists. Return an empty list if the file is missing or damaged."""
        try:
            return _read(json.loads(self._folder.read(INDEX_FILE)))
        except FileNotFoundError:
            return []
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            logger.warning("Checkpointing: %s in %s is damaged: %r", INDEX_FILE, self._folder, error)
            return []

    def _look_around(self) -> None:
        """Compare the list of checkpoints with the files in the folder before the run begins.

        Checkpoints whose files were deleted are removed from the list. If the list is then empty, but the index file
        lists checkpoints of another run, log a warning, and keep them in the index file.
        """
        present = set(self._folder.names())
        self._saved = [each for each in self._saved if each.content in present]
        indexed = [] if self._saved else self._indexed()
        if indexed:
            logger.warning(
                "Checkpointing: %s has %d checkpoints of another run, which this one may replace; to continue that "
                'run, pass `resume_from="auto"`',
                self._folder,
                len(indexed),
            )
        self._write_index(self._saved or indexed)  # raises an error if the folder is not writable


def _count_or_none(name: str, value: Any, hint: str) -> int | None:
    return None if value is None else checks.check_count(name, value, hint)


def _name_of(epoch: int, step: int) -> str:
    """Return the name of the checkpoint file after `epoch` epochs and `step` batches of the next epoch.

    Sorting the names alphabetically sorts the checkpoints by time, up to 9,999 epochs and 999,999 batches per epoch.
    """
    return f"epoch_{epoch:04d}_step_{step:06d}.ckpt" if step else f"epoch_{epoch:04d}.ckpt"


def _in_words(saved: Saved) -> str:
    epoch, step = saved.number
    return f"epoch {epoch}, step {step}" if step else f"epoch {epoch}"


def _end_in_words(run: Run, error: BaseException | None) -> str:
    """Describe how a run ended, for `raysgd status`: one word, followed by the reason if one is known."""
    if error is None:
        reason = run.history.stop_reason
        return "finished" if reason is None else f"stopped: {reason}"
    kind, lines = type(error).__name__, str(error).splitlines()
    if not isinstance(error, Exception):
        return f"interrupted: {kind}"
    return f"failed: {kind}: {masked(lines[0])}" if lines else f"failed: {kind}"


def _as_state(saved: list[Saved]) -> dict[str, Any]:
    entries = []
    for each in saved:
        epoch, step = each.number
        inside = {"step": step} if step else {}
        entries.append({"name": each.content, "epoch": epoch, **inside, "score": each.score})
    return {"saved": entries}


def _read(state: Mapping[str, Any]) -> list[Saved]:
    """Return the checkpoints in a state.

    The state may come from a stranger, and the files that it names may be deleted. It therefore must name each file as
    this callback does.

    Raises:
        ValueError: A name is not the one that this callback gives a checkpoint of the same epoch and step.
    """
    saved = []
    for each in state["saved"]:
        number = int(each["epoch"]), int(each.get("step", 0))
        name = _name_of(*number)
        if each["name"] != name:
            raise ValueError(f"the name of a checkpoint is {printable(repr(each['name']))}, not {name!r}")
        saved.append(SavedCheckpoint(number, None if each["score"] is None else float(each["score"]), name))
    return saved
