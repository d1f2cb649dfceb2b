"""`replay`: repeats a part of a past run in one process, and compares each step with the journal of the run."""

from __future__ import annotations

import os
import pdb
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.history.history import History
from raysgd.journal.journal import Journal, Leg
from raysgd.replay.program import Program, batch_options_for
from raysgd.replay.questions import journal_of
from raysgd.replay.sample_losses import data_of, nearest_checkpoint, whole_batch
from raysgd.replay.samples import samples_of
from raysgd.torch.objects import rng
from raysgd.torch.torch_trainer import TorchTrainer

TOLERANCE = 1e-3
"""Largest relative difference between two losses that rounding can explain, without `deterministic=True`."""
_SAME_DATA = ("kind", "order", "seed", "num_samples", "batch_size", "drop_last", "stream")


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        step: The last step that was replayed.
        begin: The step after which the replay started.
        checkpoint: The checkpoint from which the replay started, or None if it started at the beginning of the run.
        is_exact: True if the loss and the gradient norm of each compared step are bitwise equal to the values in the
            journal.
        difference: Largest relative difference between the loss of a step and the loss in the journal.
        first_different: The first step whose loss or norm is not bitwise equal, or None if all are equal.
        tolerance: Largest relative difference that rounding can explain. 0 with `deterministic=True`.
        incomplete: Steps that were not compared, because a worker of the run was lost before the driver had this
            worker's part of the loss.
        state: The training state after the last step, as `trainer.state_dict()` returns it.
    """

    step: int
    begin: int
    checkpoint: str | None
    is_exact: bool
    difference: float
    first_different: int | None
    tolerance: float
    incomplete: tuple[int, ...]
    state: Mapping[str, Any]

    @property
    def is_same(self) -> bool:
        """True if losses and norms are bitwise equal or, with a tolerance, if the losses differ by at most that."""
        return self.is_exact or (self.tolerance > 0 and self.difference <= self.tolerance)

    def __str__(self) -> str:
        """Return a description of the result as text."""
        begin = f"from {self.checkpoint}" if self.checkpoint else "from the beginning of the run"
        lines = [f"replayed steps {self.begin + 1} to {self.step}, {begin}"]
        if self.is_exact:
            lines.append("each loss has the bits that the run had")
        elif self.is_same:
            lines.append(
                f"the largest difference of a loss is {self.difference:.2g} of it, which rounding explains (up to "
                f"{self.tolerance:g}); `deterministic=True` keeps the bits"
            )
        else:
            lines.append(
                f"the replay is not the run: step {self.first_different} is the first that differs, and the largest "
                f"difference of a loss is {self.difference:.2g} of it (allowed: {self.tolerance:g})"
            )
        if self.incomplete:
            lines.append(f"not compared, because a lost worker had a part: {', '.join(map(str, self.incomplete))}")
        return "\n".join(lines)


class _ReachedStep(BaseException):
    """Raised to end a replay after its last step.

    This is a `BaseException`, so that `except Exception` in the user's code does not catch it.
    """


class _StopAfter(Callback):
    """Callback that ends the replay after a given step, and stores the training state after this step."""

    _pauses = True

    def __init__(self, step: int) -> None:
        self._step = step
        self.state: Mapping[str, Any] | None = None

    def _pause_at(self, global_step: int) -> int | None:
        return self._step if global_step < self._step else None

    def _on_pause(self, run: Run, global_step: int) -> None:
        if global_step >= self._step:
            assert run.trainer is not None, "class-based trainers call it"
            self.state = run.trainer.state_dict()
            raise _ReachedStep


class _Debugging(WorkerCallback):
    """Worker callback that stops in the debugger before `train_batch` is called for a given step."""

    def __init__(self, begin: int, step: int, load: Callable[[], Any]) -> None:
        self._steps, self._load = range(begin, step), load
        self._wrapped: Any = None

    def __deepcopy__(self, memo: Any) -> _Debugging:
        return self  # no copy: the replay and the debugger run in this process

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerCallback, ()  # in another process, do nothing, because the debugger cannot run there

    def on_begin(self, operator: Any) -> None:
        if self._wrapped is operator:
            return
        self._wrapped, method, load = operator, operator.train_batch, self._load

        @wraps(method)
        def train_batch(batch: Any, batch_info: dict[str, Any]) -> Any:
            if operator.global_step in self._steps:
                self._steps = range(0)  # stop only once
                drawn = rng.capture()
                _stop(operator, batch, batch_info, load())
                rng.restore(drawn)
            return method(batch, batch_info)

        operator.train_batch = train_batch


def _stop(operator: Any, batch: Any, batch_info: dict[str, Any], global_batch: Any) -> None:
    """Stop in the debugger. The user can inspect the arguments of this function there.

    Args:
        operator: The training operator.
        batch: The first batch of the step.
        batch_info: The second argument of `train_batch`.
        global_batch: One batch with the samples of all ranks in the step.
    """
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout)
    debugger.set_trace(sys._getframe())
    pass  # You can inspect `operator`, `batch`, `batch_info` and `global_batch` here.


def replay(
    run: str | os.PathLike[str] | History,
    step: int,
    *,
    program: Any,
    config: Mapping[str, Any] | None = None,
    debug: bool = False,
    worker_callbacks: tuple[WorkerCallback, ...] = (),
    begin: int | None = None,
) -> Replayed:
    """Repeat a part of a run in this process, from the nearest checkpoint before a step up to that step.

    Args:
        run: The folder or the history of the run.
        step: Number of the last step to replay, from 1.
        program: The operator class of the run, or its location, such as "train.py:MyOperator".
        config: Entries of the config that are missing in the journal: objects and secrets.
        debug: Whether to stop in the debugger `pdb` before `train_batch` of the step.
        worker_callbacks: Worker callbacks that are called around each step of the replay.
        begin: Start from the newest checkpoint that was saved at or before this step. Default: start from the newest
            checkpoint from before `step`. If there is no such checkpoint, start at the beginning of the run.

    Returns:
        The comparison with the journal, and the training state after the step.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The run has no step with this number, or one process cannot repeat the steps of the run. The message
            gives the reason.
    """
    journal = journal_of(run)
    journal.check_step(step)
    checkpoint = nearest_checkpoint(journal, step if begin is None else begin + 1)
    start = 0 if checkpoint is None else checkpoint[0]
    legs = [each for each in journal.legs if each.until > start and each.after < step]
    _check_legs(journal, legs, checkpoint)
    last, chosen = legs[-1], Program(program, config)
    with chosen.trainer(journal, legs[0]) as trainer, tempfile.TemporaryDirectory(prefix="raysgd-") as temporary:
        stopping = _StopAfter(step)
        callbacks: list[Any] = [stopping, *worker_callbacks]
        if debug:
            samples = samples_of(journal, step, data_of(trainer))
            load = lambda: whole_batch(data_of(trainer), samples)  # noqa: E731
            callbacks.append(_Debugging(journal.begin_of(step), step, load))
        _train(trainer, last, checkpoint, temporary, callbacks)
        assert stopping.state is not None, "the run reached the step"
        return _compared(journal, Journal(temporary), start, step, checkpoint, stopping.state)


def _train(
    trainer: TorchTrainer, leg: Leg, checkpoint: tuple[int, str] | None, folder: str, callbacks: list[Any]
) -> None:
    options: dict[str, Any] = {"validation_freq": leg.run["validation_freq"], "log_every_n_steps": 0}
    if checkpoint is not None:
        options["resume_from"] = checkpoint[1]
    try:
        trainer.fit(leg.run["epochs"], folder=folder, callbacks=callbacks, progress=False, **options)
    except _ReachedStep:
        return
    raise ValueError("the program ended its run before the step: it is not the program of the run.")


def _check_legs(journal: Journal, legs: list[Leg], checkpoint: tuple[int, str] | None) -> None:
    """Check that one process can repeat the steps in all of these parts of epochs.

    Args:
        journal: The journal of the run.
        legs: The parts of epochs to repeat. Each part was run by one group of workers.
        checkpoint: Step and location of the checkpoint from which to start, or None to start at the beginning.

    Raises:
        ValueError: One process cannot repeat some steps. The message gives the reason.
    """
    first = legs[0]
    for leg in legs:
        if leg.entry["is_of_call"] or leg.run["has_dataset"]:
            raise ValueError("the run trained on the `dataset` of `fit`, which is not part of the program.")
        if leg.entry["obstacle"] is not None:
            raise ValueError(f"the run cannot be replayed: {leg.entry['obstacle']}.")
        if batch_options_for(leg) != batch_options_for(first):
            raise ValueError(
                f"the run went from {first.entry['num_workers']} to {leg.entry['num_workers']} workers after step "
                f"{leg.after}, which changed its global batch: replay a step before that, or after a checkpoint that "
                "follows. With `split_batches=True` the global batch stays."
            )
    if checkpoint is None and first.after > 0:
        raise ValueError(
            f"the journal begins after step {first.after}, and no checkpoint before the step is left. "
            "`Checkpointing(keep_last=None)` keeps all."
        )


def _compared(
    journal: Journal,
    replayed: Journal,
    begin: int,
    step: int,
    checkpoint: tuple[int, str] | None,
    state: Mapping[str, Any],
) -> Replayed:
    """Compare the losses and norms of the replayed steps with the values in the journal of the run.

    Return the result of the replay.

    Args:
        journal: The journal of the run.
        replayed: The journal of the replay.
        begin: The step after which the replay started.
        step: The last step of the replay.
        checkpoint: Step and location of the checkpoint from which the replay started, or None.
        state: The training state after the last step of the replay.

    Raises:
        ValueError: The replay trained on different data, or did not take one of the steps.
    """
    numbers = [number for number in journal.numbers() if begin < number <= step]
    is_deterministic = journal.leg_of(step).run["options"]["batch_options"]["deterministic"]
    difference, first, incomplete = 0.0, None, list[int]()
    for number in numbers:
        _check_data(journal, replayed, number)
        then, now = journal.check_step(number), replayed.step(number)
        if now is None:
            raise ValueError(f"the replay took no step {number}: the program is not that of the run.")
        if then.weight != now.weight:
            incomplete.append(number)
            continue
        norms_differ = then.norm is not None and now.norm is not None and then.norm != now.norm
        if _bits(then.loss) == _bits(now.loss) and not norms_differ:
            continue
        first = number if first is None else first
        gap = abs(then.loss - now.loss) / max(abs(then.loss), 1e-12)
        difference = max(difference, gap if gap == gap else float("inf"))
    place = None if checkpoint is None else checkpoint[1]
    tolerance = 0.0 if is_deterministic else TOLERANCE
    return Replayed(step, begin, place, first is None, difference, first, tolerance, tuple(incomplete), state)


def _check_data(journal: Journal, replayed: Journal, number: int) -> None:
    then, now = journal.leg_of(number), replayed.leg_of(number)
    for name in _SAME_DATA:
        before, after = then.entry["data"].get(name), now.entry["data"].get(name)
        if before != after and not (name == "batch_size" and then.entry["data"].get("rule") is None):
            advice = " Pass the `seed` of the run to its trainer." if name == "seed" else ""
            raise ValueError(
                f"the replay trains on other data than the run: {name} {after!r} instead of {before!r}.{advice} "
                "The file of a checkpoint holds the seed; without one, the run needs `seed=` to be repeated."
            )


def _bits(loss: float) -> str:
    return "nan" if loss != loss else loss.hex()
