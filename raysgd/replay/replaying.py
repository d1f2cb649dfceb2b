"""`replay`: repeats a part of a past run in one process, and compares each step with the journal of the run."""

from __future__ import annotations

import math
import os
import pdb
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core.history.history import History
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.journal.entries import Leg
from raysgd.journal.journal import Journal, StepRecord, journal_of
from raysgd.replay.comparing import Comparison, compare, records_of, rounding_of, sizes_of
from raysgd.replay.program import Program, batch_options_for, nearest_checkpoint, options_of
from raysgd.replay.questions import batch_of, data_of, samples_of
from raysgd.torch.objects import rng
from raysgd.torch.torch_trainer import TorchTrainer

_SAME_DATA = ("kind", "order", "seed", "num_samples", "batch_size", "drop_last", "stream")


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        step: The last step that was replayed.
        begin: The step after which the replay started.
        checkpoint: The checkpoint from which the replay started, or None if it started at the beginning of the run.
        comparison: How the losses and norms of the steps differ from those in the journal, as a `Comparison`.
        records: The losses and norms of the replay, in the order of steps.
        state: The training state after the last step, as `trainer.state_dict()` returns it.
    """

    step: int
    begin: int
    checkpoint: str | None
    comparison: Comparison
    records: tuple[StepRecord, ...]
    state: Mapping[str, Any]

    @property
    def is_exact(self) -> bool:
        """True if the loss and the gradient norm of each compared step have the bits that the run had."""
        return self.comparison.bits_at is None

    @property
    def is_same(self) -> bool:
        """True if no loss or norm differs more than rounding explains. `deterministic=True` rounds only means."""
        return self.comparison.step is None

    @property
    def first_different(self) -> int | None:
        """The first step whose loss or norm differs more than rounding explains, or None."""
        return self.comparison.step

    @property
    def difference(self) -> float:
        """Largest difference between the loss of a step and the loss in the journal, relative to the loss."""
        return self.comparison.largest

    @property
    def incomplete(self) -> tuple[int, ...]:
        """Steps that were not compared, because the mean loss of the run has another weight.

        This is so if a worker was lost before the driver had this worker's part of the loss.
        """
        return self.comparison.incomplete

    def __str__(self) -> str:
        """Return a description of the result as text."""
        found = self.comparison
        begin = (
            f"from {printable(masked(self.checkpoint), None)}" if self.checkpoint else "from the beginning of the run"
        )
        lines = [f"replayed steps {self.begin + 1} to {self.step}, {begin}"]
        largest = f"the largest difference of a loss is {found.largest:.2g} of it"
        if self.is_exact:
            lines.append("each loss has the bits that the run had")
        elif found.values is None:
            advice = "" if found.rounding is None else "; `deterministic=True` keeps the bits"
            lines.append(f"{largest}, {found.cause}{advice}")
        else:
            limit = "" if found.rounding is None else " more than rounding explains"
            lines.append(
                f"the replay is not the run: step {found.step} is the first that differs{limit}, with a {found.what} "
                f"of {found.values[0]:.6g} in the run and {found.values[1]:.6g} in the replay; {largest}"
            )
            if found.bits_at != found.step:
                lines.append(f"rounding explains the other bits from step {found.bits_at} on")
            if found.rounding is not None:
                lines.append("dropout and batch norms of several workers are repeated only with `deterministic=True`")
        if self.incomplete:
            steps = ", ".join(map(str, self.incomplete))
            lines.append(f"not compared, because the mean of the run has another weight: {steps}")
        return "\n".join(lines)


class _ReachedStep(BaseException):
    """Raised to end a replay after its last step.

    This is a `BaseException`, so that `except Exception` in the user's code does not catch it.
    """


class _StopAfter(Callback):
    """Callback that ends the replay after a given step, and saves the training state after this step.

    Args:
        step: Number of the step.
        file: Where to save the state for the trainer that continues. None to keep it in `state`.
    """

    _pauses = True

    def __init__(self, step: int, file: str | None) -> None:
        self._step, self._file = step, file
        self.state: Mapping[str, Any] = {}

    def _pause_at(self, global_step: int) -> int | None:
        return self._step if global_step < self._step else None

    def _on_pause(self, run: Run, global_step: int) -> None:
        if global_step >= self._step:
            assert run.trainer is not None, "class-based trainers call it"
            if self._file is None:
                self.state = run.trainer.state_dict()
            else:
                run.save(self._file)
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
    # Without `.pdbrc`, because the working directory may be the folder of someone else's run.
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout, readrc=False)
    debugger.set_trace(sys._getframe())
    pass  # You can inspect `operator`, `batch`, `batch_info` and `global_batch` here.


def replay(
    run: str | os.PathLike[str] | History,
    step: int,
    *,
    program: Any,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
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
        options: Arguments of the trainer that are missing in the journal, such as a dict for `compile`.
        checkpoints: Path or URI of the folder with the checkpoints, if they are not in the folder of the run.
        debug: Whether to stop in the debugger `pdb` before `train_batch` of the step.
        worker_callbacks: Worker callbacks that are called around each step of the replay.
        begin: Start from the newest checkpoint in the folder of the run that was saved at or before this step. Default:
            start from the newest checkpoint from before `step`. If there is no such checkpoint, start at the beginning
            of the run.

    Returns:
        The comparison with the journal, and the training state after the step.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The run has no step with this number, or one process cannot repeat the steps of the run. The message
            gives the reason.
    """
    journal = journal_of(run)
    journal.check_step(step)
    before: float = step if begin is None else begin + 1
    while before < math.inf:
        start, place = nearest_checkpoint(journal, int(before), checkpoints, only_inside=begin is not None)
        goals = (each.back_to for each in journal.left_out if start < each.step <= step and each.back_to is not None)
        before = min((goal + 1 for goal in goals if goal < start), default=math.inf)  # `Guard` restored that state
    legs = [each for each in journal.legs if each.until > start and each.after < step]
    _check_legs(legs, place)
    chosen, file = Program(program, config, options), place
    # If options change in a run, such as the global batch after the loss of a worker, another trainer continues.
    parts = [list(part) for _, part in groupby(legs, lambda leg: (batch_options_for(leg), chosen.arguments_for(leg)))]
    with tempfile.TemporaryDirectory(prefix="raysgd-") as temporary:
        for number, part in enumerate(parts, start=1):
            is_last = number == len(parts)
            until, begin_of_next = (step, None) if is_last else (part[-1].until, f"{temporary}/{number}.ckpt")
            stopping = _StopAfter(until, begin_of_next)
            callbacks: list[Any] = [stopping, *worker_callbacks]
            if journal.left_out:
                from raysgd.callbacks.guard import Repeated

                callbacks.append(Repeated(journal.left_out))
            with chosen.trainer(part[0]) as trainer:
                if debug and is_last:
                    rows = [row for own in samples_of(journal, step, data_of(trainer)).rows for row in own]
                    load = lambda: batch_of(data_of(trainer), rows)  # noqa: B023, E731
                    callbacks.append(_Debugging(journal.begin_of(step), step, load))
                _train(trainer, part[-1], until, file, temporary, callbacks)
            file = begin_of_next
        replayed = Journal(temporary)
    numbers = [number for number in journal.numbers() if start < number <= step]
    for number in numbers:
        _check_data(journal, replayed, number)
        if replayed.step(number) is None:
            raise ValueError(f"the replay took no step {number}: the program is not that of the run.")
    rounding = rounding_of(legs, are_exact=all(options_of(leg).deterministic for leg in legs))
    then, now = (records_of(each, numbers) for each in (journal, replayed))
    comparison = compare(then, now, rounding, sizes_of(journal))
    return Replayed(step, start, place, comparison, tuple(now), stopping.state)


def _train(trainer: TorchTrainer, leg: Leg, until: int, file: str | None, folder: str, callbacks: list[Any]) -> None:
    """Train from a checkpoint, or from the beginning, until `_StopAfter` ends the replay after the step `until`."""
    epochs = leg.run.epochs
    try:
        trainer.fit(
            epochs,
            folder=folder,
            callbacks=callbacks,
            progress=False,
            resume_from=file,
            validation_freq=leg.run.validation_freq,
            log_every_n_steps=0,
            max_steps=until if epochs is None else None,
        )
    except _ReachedStep:
        return
    raise ValueError("the program ended its run before the step: it is not the program of the run.")


def _check_legs(legs: list[Leg], checkpoint: str | None) -> None:
    """Check that one process can repeat the steps in all of these parts of epochs.

    Args:
        legs: The parts of epochs to repeat. Each part was run by one group of workers.
        checkpoint: Path or URI of the checkpoint from which to start, or None to start at the beginning.

    Raises:
        ValueError: One process cannot repeat some steps. The message gives the reason.
    """
    for leg in legs:
        if leg.is_of_call or leg.run.has_dataset:
            raise ValueError("the run trained on the `dataset` of `fit`, which is not part of the program.")
        if leg.obstacle is not None:
            raise ValueError(f"the run cannot be replayed: {leg.obstacle}.")
    if checkpoint is None and legs[0].after > 0:
        raise ValueError(
            f"the journal begins after step {legs[0].after}, and no checkpoint before the step is left. "
            "`Checkpointing(keep_last=None)` keeps all."
        )


def _check_data(journal: Journal, replayed: Journal, number: int) -> None:
    then, now = journal.leg_of(number), replayed.leg_of(number)
    for name in _SAME_DATA:
        before, after = getattr(then.data, name, None), getattr(now.data, name, None)
        if before != after and not (name == "batch_size" and getattr(then.data, "rule", None) is None):
            raise ValueError(
                f"the replay trains on other data than the run: {name} {after!r} instead of {before!r}. "
                "The file of a checkpoint holds the seed; without one, the run needs `seed=` to be repeated."
            )
