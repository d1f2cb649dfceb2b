"""Checkpoints in the driver: which are kept, how they are written, and which one a run goes on from.

Why a checkpoint is copied first and fetched later: ADR 41.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from raysgd._atomic_file import replacing
from raysgd._checks import is_integer
from raysgd._paths import check_local
from raysgd.train.constants import TIMESTAMP, TRAIN_CHECKPOINT_SUBDIR

logger = logging.getLogger(__name__)

MAX = "max"
MIN = "min"
_DIRECTORY_FILE = "dict_checkpoint.pkl"  # in the directories that later versions of the old library wrote


class CheckpointLostError(Exception):
    """A checkpoint was lost together with the worker that was sending it. The run goes on from the one before."""


@dataclass
class CheckpointStrategy:
    """Which checkpoints of a run stay on disk.

    Attributes:
        num_to_keep: How many; None for all, 0 for none (the latest one is then kept in memory only).
        checkpoint_score_attribute: The key of a checkpoint by which it is judged.
        checkpoint_score_order: Whether "max" or "min" of it is best. Of equals the newer one is better.

    Raises:
        ValueError: A number below 0, or another order.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = TIMESTAMP
    checkpoint_score_order: str = MAX

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and (not is_integer(self.num_to_keep) or self.num_to_keep < 0):
            raise ValueError(f"`num_to_keep={self.num_to_keep!r}`: need None, for all of them, or 0 or more.")
        if not isinstance(self.checkpoint_score_attribute, str):
            raise ValueError(
                f"`checkpoint_score_attribute={self.checkpoint_score_attribute!r}`: need the name of a value in the "
                "checkpoints."
            )
        if self.checkpoint_score_order not in (MAX, MIN):
            raise ValueError(
                f'`checkpoint_score_order={self.checkpoint_score_order!r}`: allowed are "{MAX}" and "{MIN}".'
            )


def check_strategy(strategy: CheckpointStrategy | None) -> None:
    """Checks what says which checkpoints stay.

    Raises:
        TypeError: It is neither a strategy nor None.
    """
    if strategy is not None and not isinstance(strategy, CheckpointStrategy):
        raise TypeError(
            f"`checkpoint_strategy={strategy!r}`: need a `CheckpointStrategy`, such as "
            "`CheckpointStrategy(num_to_keep=2)`, or None, which keeps all."
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is written, and which one is deleted for it."""

    is_kept: bool
    dropped: int | None = None


class Retention:
    """Decides which checkpoints stay. Touches nothing.

    Args:
        strategy: The rules.
    """

    def __init__(self, strategy: CheckpointStrategy) -> None:
        self._strategy = strategy
        self._kept: dict[int, tuple[bool, float, int]] = {}

    def check(self, score: Any) -> None:
        """Checks that `score`, the value of the checkpoint's score attribute, can be compared.

        Raises:
            ValueError: It is missing or no number.
        """
        if self._strategy.num_to_keep == 0:
            return
        name = self._strategy.checkpoint_score_attribute
        if score is None:
            raise ValueError(
                f"The checkpoint has no {name!r}, by which `checkpoint_score_attribute` has it judged: pass it to "
                "`save_checkpoint`."
            )
        if not isinstance(score, Real) and not _is_one_number(score):
            raise ValueError(f"The checkpoint's {name!r} is {score!r}: the score must be a number.")

    def admit(self, identity: int, score: Any) -> Verdict:
        """Decides on the checkpoint number `identity`."""
        limit = self._strategy.num_to_keep
        if limit == 0:
            return Verdict(is_kept=False)
        rank = self._rank(identity, float(score))
        if limit is None or len(self._kept) < limit:
            self._kept[identity] = rank
            return Verdict(is_kept=True)
        worst = min(self._kept, key=self._kept.__getitem__)
        if rank <= self._kept[worst]:
            return Verdict(is_kept=False)
        del self._kept[worst]
        self._kept[identity] = rank
        return Verdict(is_kept=True, dropped=worst)

    @property
    def best(self) -> int | None:
        """The best checkpoint that is kept."""
        return max(self._kept, key=self._kept.__getitem__) if self._kept else None

    def _rank(self, identity: int, score: float) -> tuple[bool, float, int]:
        """Compares as the checkpoints do: NaN is worse than any number, and the newer of equals is better."""
        if math.isnan(score):
            return False, 0.0, identity
        return True, score if self._strategy.checkpoint_score_order == MAX else -score, identity


def _is_one_number(value: Any) -> bool:
    """Whether this is a numpy scalar or a tensor of one element."""
    if isinstance(value, str | bytes | bool):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


class CheckpointManager:
    """Takes the checkpoints of one run after the other. One is on its way at a time; the function does not wait for it.

    Attributes:
        latest_checkpoint_id: Number of the newest checkpoint of the run, from 1.
    """

    def __init__(self) -> None:
        self.latest_checkpoint_id = 0
        self.latest_checkpoint_dir: Path | None = None
        self._latest: dict[str, Any] | None = None
        self._latest_of_run: dict[str, Any] | None = None
        self._latest_path: Path | None = None
        self._begun_from: dict[str, Any] | None = None
        self._strategy = CheckpointStrategy()
        self._retention = Retention(self._strategy)
        self._landing: threading.Thread | None = None
        self._has_arrived = threading.Event()
        self._error: BaseException | None = None

    def begin_run(
        self,
        run_dir: Path | None,
        checkpoint: dict[str, Any] | None = None,
        strategy: CheckpointStrategy | None = None,
        latest_id: int | None = None,
    ) -> None:
        """Gets ready for a run.

        Args:
            run_dir: Where its checkpoints go, in a folder of their own; None to write none.
            checkpoint: What the run starts from.
            strategy: What is kept; None for all.
            latest_id: The number that those of this run follow.
        """
        try:
            self.flush()
        except Exception as error:  # of a run that has ended, with another error or before its end
            logger.error("could not keep the last checkpoint of the previous run: %r", error)
        self._begun_from = checkpoint
        self._latest_of_run = self._latest_path = None
        self._strategy = strategy or CheckpointStrategy()
        self._retention = Retention(self._strategy)
        self.latest_checkpoint_id = latest_id or 0
        self.latest_checkpoint_dir = run_dir / TRAIN_CHECKPOINT_SUBDIR if run_dir is not None else None

    @property
    def score_attribute(self) -> str:
        """The key of a checkpoint by which it is judged."""
        return self._strategy.checkpoint_score_attribute

    def add(self, score: Any, receive: Callable[[], dict[str, Any]]) -> None:
        """Takes a checkpoint over. Returns at once; `receive` gets it, from a thread.

        Args:
            score: The value by which it is judged.
            receive: Gets it; raises `CheckpointLostError` when it was lost.

        Raises:
            ValueError: `score` cannot be compared.
            Exception: What went wrong with an earlier one, an `OSError` when it could not be written.
        """
        self._retention.check(score)
        self.flush()
        self.latest_checkpoint_id += 1
        self._has_arrived.clear()
        self._landing = threading.Thread(
            target=self._land,
            args=(self.latest_checkpoint_id, score, receive),
            name="raysgd-checkpoint",
            daemon=True,
        )
        self._landing.start()

    def _land(self, identity: int, score: Any, receive: Callable[[], dict[str, Any]]) -> None:
        try:
            try:
                checkpoint = receive()
            finally:
                self._has_arrived.set()
            self._latest = self._latest_of_run = checkpoint
            self._keep(identity, score, checkpoint)
        except CheckpointLostError as error:
            logger.warning("checkpoint %s was lost with its worker: %s", identity, error)
        except BaseException as error:
            self._error = error

    def _keep(self, identity: int, score: Any, checkpoint: dict[str, Any]) -> None:
        verdict = self._retention.admit(identity, score)
        if not verdict.is_kept or self.latest_checkpoint_dir is None:
            return
        path = self._path(identity)
        write_checkpoint(checkpoint, path)
        self._latest_path = path
        if verdict.dropped is not None:
            self._path(verdict.dropped).unlink(missing_ok=True)

    def await_arrival(self, timeout_s: float) -> None:
        """Waits until nothing is on its way from a worker any more, whatever became of it; not until it is written."""
        if self._landing is not None and not self._has_arrived.wait(timeout_s):
            logger.warning(
                "checkpoint %s did not arrive within %g s; stopping its worker anyway",
                self.latest_checkpoint_id,
                timeout_s,
            )

    def flush(self) -> None:
        """Waits until what is on its way has arrived and is written.

        Raises:
            Exception: What went wrong with it, an `OSError` when it could not be written.
        """
        if self._landing is not None:
            self._landing.join()
            self._landing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _path(self, identity: int) -> Path:
        assert self.latest_checkpoint_dir is not None
        return self.latest_checkpoint_dir / f"checkpoint_{identity:06d}"

    # ---------------------------------------------------------------------------------------------- what there is

    @property
    def restart_point(self) -> dict[str, Any] | None:
        """What a function that is started again goes on from: the newest of this run, or what it began from."""
        self.flush()
        return self._latest_of_run if self._latest_of_run is not None else self._begun_from

    @property
    def has_own(self) -> bool:
        """Whether the run has saved one."""
        return self._landing is not None or self._latest_of_run is not None

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of any run."""
        self.flush()
        return self._latest

    @property
    def latest_checkpoint_path(self) -> Path | None:
        """The newest file of the latest run that is there; None when there is none."""
        self.flush()
        if self._latest_path is not None and self._latest_path.exists():
            return self._latest_path
        return self.best_checkpoint_path

    @property
    def best_checkpoint_path(self) -> Path | None:
        """The best file of the latest run; None when there is none."""
        self.flush()
        best = self._retention.best
        return self._path(best) if best is not None and self.latest_checkpoint_dir is not None else None


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a file that is whole or not there."""
    from ray import cloudpickle

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(str(path)) as file:
        cloudpickle.dump(dict(checkpoint), file, protocol=5)


def load_checkpoint(checkpoint: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """A checkpoint: as it is if it is a dict, else read from a path. Reading runs what the file says, as any pickle.

    Raises:
        ValueError: There is nothing at that path, or it is a URI.
        TypeError: It is neither a dict nor a path.
    """
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint)
    if not isinstance(checkpoint, str | Path):
        raise TypeError(f"`checkpoint={checkpoint!r}`: need a dict, or the path of a saved one.")
    check_local("checkpoint", checkpoint)
    path = Path(checkpoint).expanduser()
    if not path.exists():
        raise ValueError(f"`checkpoint={str(checkpoint)!r}`: there is no such file.")
    from ray import cloudpickle

    with open(path / _DIRECTORY_FILE if path.is_dir() else path, "rb") as file:
        found: dict[str, Any] = cloudpickle.load(file)
    return found
