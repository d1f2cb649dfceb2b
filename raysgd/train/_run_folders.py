"""The folders of a trainer: one for itself, in it one for each run."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path

from raysgd._paths import check_path
from raysgd.train import constants
from raysgd.train.utils import construct_path

logger = logging.getLogger(__name__)


def make_logdir(log_dir: str | Path | None) -> Path:
    """Makes the folder of a trainer and returns it; without a name, a new one with the time."""
    if log_dir is not None:
        check_path("logdir", log_dir)
    name = log_dir or time.strftime("train_%Y-%m-%d_%H-%M-%S")
    path = construct_path(name, constants.DEFAULT_RESULTS_DIR)
    path.mkdir(parents=True, exist_ok=True)
    logger.info("the results of this trainer go to %s", path)
    return path


class RunFolders:
    """The folders of the runs of one trainer."""

    def __init__(self, logdir: Path) -> None:
        self.logdir = logdir
        self._run_id = 0

    def make_next(self) -> Path:
        """Makes the folder of the next run and returns it: the next number that no other trainer has taken."""
        while True:
            self._run_id += 1
            run_dir = self._of(self._run_id)
            with suppress(FileExistsError):
                run_dir.mkdir(parents=True)
                return run_dir

    @property
    def latest(self) -> Path | None:
        """The folder of the latest run; None before the first one."""
        return self._of(self._run_id) if self._run_id else None

    @property
    def latest_checkpoints(self) -> Path | None:
        """Where the checkpoints of the latest run are, or would be; None before the first one."""
        return self.latest / constants.TRAIN_CHECKPOINT_SUBDIR if self.latest is not None else None

    def _of(self, run_id: int) -> Path:
        return self.logdir / f"run_{run_id:03d}"
