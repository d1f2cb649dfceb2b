"""A function as a trial of Ray Tune: each trial makes a trainer and tells Tune what rank 0 reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.driver import tune_trial
from raysgd.driver.tune_trial import TrialInfo, TrialStepResult
from raysgd.train.checkpoint import CheckpointStrategy, load_checkpoint, write_checkpoint
from raysgd.train.constants import TUNE_CHECKPOINT_FILE_NAME, TUNE_CHECKPOINT_ID

if TYPE_CHECKING:
    from raysgd.train.trainer import Trainer, TrainingIterator

_FOLDER = "raysgd"


@dataclass(frozen=True)
class TrialPlan:
    """The plan that every trial follows.

    Attributes:
        make_trainer: Makes a trainer that writes into a folder.
        train_func: Its function; it gets the config of the trial.
        dataset: Its data.
        bundles: What one trial needs: the trial itself, then each worker.
        strategy: How these are placed.
        refuses_more_steps: Whether a step after the end is an error; else it says once more that this is the end.
    """

    make_trainer: Callable[..., Trainer]
    train_func: Callable[..., Any]
    dataset: Any = None
    bundles: list[dict[str, float]] = field(default_factory=list)
    strategy: str = "PACK"
    refuses_more_steps: bool = False


def make_trainable(plan: TrialPlan) -> type[Any]:
    """The class for `tune.Tuner` or `tune.run`.

    Raises:
        MissingTuneError: Ray Tune is not installed.
    """
    return tune_trial.make_trainable(
        partial(FunctionTrial, plan),
        lambda config: plan.bundles,
        "TrainTrainable",
        strategy=plan.strategy,
        purpose="`to_tune_trainable`",
    )


class FunctionTrial:
    """One run of a trainer, step by step.

    Args:
        plan: What to run.
        config: The config of the function.
        info: Where the trainer writes.
    """

    def __init__(self, plan: TrialPlan, config: dict[str, Any], info: TrialInfo) -> None:
        self._plan, self._config, self._logdir = plan, config, info.logdir / _FOLDER
        self._begin_from: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        self._iterator: TrainingIterator | None = None
        self._first_id = 0
        self._num_saved = 0
        self._has_ended = False

    def step(self) -> TrialStepResult:
        """Rank 0's next report, and whether there is a checkpoint that Tune does not have yet.

        Raises:
            RuntimeError: The function has ended, and the plan allows no further step.
        """
        if self._has_ended and self._plan.refuses_more_steps:
            raise RuntimeError("The function has ended, so there is no further step.")
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        results = next(self._iterator, None)
        is_saved = self._num_taken > self._num_saved
        if results is None:
            self._has_ended = True
            return TrialStepResult(None, is_saved, is_last=True)
        return TrialStepResult(results[0], is_saved)

    def _begin(self) -> None:
        self._trainer = self._plan.make_trainer(logdir=self._logdir)
        self._trainer.start()
        # Tune keeps the checkpoints, by its own rules.
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
        self._num_saved, self._has_ended = 0, False
        self._begin_from = content or None

    def end(self) -> None:
        """Ends the trainer."""
        trainer, self._trainer, self._iterator = self._trainer, None, None
        if trainer is not None:
            trainer.shutdown()
