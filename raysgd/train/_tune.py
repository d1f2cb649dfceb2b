"""A trainer as a trial of Ray Tune: each trial makes a trainer of its own and tells Tune what rank 0 reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd._optional import require
from raysgd.exceptions import MissingTuneError
from raysgd.train.checkpoint import CheckpointStrategy, load_checkpoint, write_checkpoint
from raysgd.train.constants import TUNE_CHECKPOINT_FILE_NAME, TUNE_CHECKPOINT_ID

if TYPE_CHECKING:
    from raysgd.train.trainer import Trainer, TrainingIterator

_FOLDER = "raysgd"


@dataclass(frozen=True)
class TrialPlan:
    """What every trial does.

    Attributes:
        make_trainer: Makes a trainer that writes into a folder.
        train_func: Its function; it gets the config of the trial.
        dataset: Its data.
        bundles: What one trial needs: the trial itself, then each worker.
    """

    make_trainer: Callable[..., Trainer]
    train_func: Callable[..., Any]
    dataset: Any = None
    bundles: list[dict[str, float]] = field(default_factory=list)


def make_trainable(plan: TrialPlan) -> type[Any]:
    """The class for `tune.Tuner` or `tune.run`.

    Raises:
        MissingTuneError: Ray Tune is not installed.
    """
    try:
        tune = require("ray.tune", extra="tune", purpose="`to_tune_trainable`")
    except ImportError as error:
        raise MissingTuneError(str(error)) from error
    from ray.tune import result as names

    class TrainTrainable(tune.Trainable):  # type: ignore[name-defined]
        """One trial."""

        def setup(self, config: dict[str, Any]) -> None:
            self._trial = Trial(plan, dict(config), Path(self.logdir) / _FOLDER)

        def step(self) -> dict[str, Any]:
            result, is_saved = self._trial.step()
            if result is not None:
                return {**result, names.SHOULD_CHECKPOINT: is_saved}
            if not is_saved:
                return {names.RESULT_DUPLICATE: True, names.DONE: True}
            return {**(self._trial.last or {}), names.SHOULD_CHECKPOINT: True, names.DONE: True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            self._trial.save(Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self._trial.load(Path(checkpoint_dir))

        def cleanup(self) -> None:
            self._trial.end()

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return tune.PlacementGroupFactory([dict(bundle) for bundle in plan.bundles], strategy="PACK")

    return TrainTrainable


class Trial:
    """One run of a trainer, step by step.

    Attributes:
        last: What rank 0 reported last.

    Args:
        plan: What to run.
        config: The config of the function.
        logdir: Where the trainer writes.
    """

    def __init__(self, plan: TrialPlan, config: dict[str, Any], logdir: Path) -> None:
        self._plan, self._config, self._logdir = plan, config, logdir
        self._begin_from: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        self._iterator: TrainingIterator | None = None
        self._first_id = 0
        self._num_saved = 0
        self.last: dict[str, Any] | None = None

    def step(self) -> tuple[dict[str, Any] | None, bool]:
        """Rank 0's next report, None at the end; and whether there is a checkpoint that Tune does not have yet."""
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        results = next(self._iterator, None)
        is_saved = self._num_taken > self._num_saved
        if results is None:
            return None, is_saved
        self.last = results[0]
        return self.last, is_saved

    def _begin(self) -> None:
        self._trainer = self._plan.make_trainer(logdir=self._logdir)
        self._trainer.start()
        # Tune keeps the checkpoints, by rules of its own.
        strategy = CheckpointStrategy(num_to_keep=0)
        self._iterator = self._trainer.run_iterator(
            self._plan.train_func, self._config, self._plan.dataset, self._begin_from, strategy
        )

    @property
    def _num_taken(self) -> int:
        return self._trainer.checkpoint_manager.latest_checkpoint_id if self._trainer is not None else 0

    def save(self, folder: Path) -> None:
        """Writes the newest checkpoint for Tune; before the first one what the trial began from."""
        self._num_saved = self._num_taken
        checkpoint = self._trainer.latest_checkpoint if self._trainer is not None else None
        content = checkpoint if checkpoint is not None else self._begin_from or {}
        identity = self._first_id + self._num_taken
        write_checkpoint({**content, TUNE_CHECKPOINT_ID: identity}, folder / TUNE_CHECKPOINT_FILE_NAME)

    def load(self, folder: Path) -> None:
        """Begins from a checkpoint that Tune kept."""
        self.end()
        content = load_checkpoint(folder / TUNE_CHECKPOINT_FILE_NAME) or {}
        self._first_id = content.pop(TUNE_CHECKPOINT_ID, 0)
        self._num_saved = 0
        self._begin_from = content or None

    def end(self) -> None:
        """Ends the trainer."""
        trainer, self._trainer, self._iterator = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()
