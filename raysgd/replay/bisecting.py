"""`bisect`: finds the first step at which two runs differ, and what differs there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raysgd.callbacks.worker_callback import WorkerCallback, models_of
from raysgd.core.history.history import History
from raysgd.journal.journal import Journal, StepRecord
from raysgd.replay.questions import journal_of
from raysgd.replay.replaying import Replayed, replay
from raysgd.replay.samples import range_of
from raysgd.torch.checkpoints import checkpoint_file

SAMPLES, NORM, LOSS, WEIGHTS = "samples", "norm", "loss", "weights"


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: The first step that differs, or None if all steps are equal.
        what: What differs: "samples", "loss", "norm", or "weights" (the weights after the step). None if all steps are
            equal.
        parameter: Name of the first parameter or buffer that differs after the step. None if the runs were not
            replayed, or if the replays have equal weights.
        left: The run, "A" or "B", that differs from its own replay. Set only if the replays of both runs are equal and
            the other run equals its replay. Otherwise, None.
        values: The losses or norms of the step in run A and in run B, or None.
        num_steps: Number of steps that are in both journals.
        equal_at: The last step after which both runs saved a checkpoint with the same weights. If `different_at` is
            set, only earlier steps count. None if there is no such step.
        different_at: The first step after which both runs saved a checkpoint, but with different weights. None if there
            is no such step.
        was_replayed: True if the steps were replayed.
    """

    step: int | None
    what: str | None = None
    parameter: str | None = None
    left: str | None = None
    values: tuple[Any, Any] | None = None
    num_steps: int = 0
    equal_at: int | None = None
    different_at: int | None = None
    was_replayed: bool = False

    def __str__(self) -> str:
        """Return a description of the difference as text."""
        lines = []
        if self.step is None:
            lines.append(f"no difference in {self.num_steps} steps")
        elif self.what == WEIGHTS:
            named = "" if self.parameter is None else f", first in `{self.parameter}`"
            lines.append(f"step {self.step}: the weights after it differ{named}")
        else:
            values = "" if self.values is None else f": {self.values[0]!r} in A, {self.values[1]!r} in B"
            named = "" if self.parameter is None else f"; after it, the weights differ first in `{self.parameter}`"
            lines.append(
                f"step {self.step}: the {self.what} differ{'' if self.what == SAMPLES else 's'}{values}{named}"
            )
        if self.left is not None:
            lines.append(f"run {self.left} left its own program there: its replay is equal to that of the other run")
        if self.what == LOSS and not self.was_replayed:
            lines.append(
                "the samples have the same places: they hold something else, or the weights before the step differ; "
                "`--program` trains the steps again and says which"
            )
        if self.equal_at is not None:
            lines.append(f"checkpoints: the same weights after step {self.equal_at}")
        if self.different_at is not None:
            lines.append(f"checkpoints: different weights after step {self.different_at}")
        return "\n".join(lines)


def bisect(
    run_a: str | os.PathLike[str] | History,
    run_b: str | os.PathLike[str] | History,
    *,
    program: Any = None,
    program_b: Any = None,
    config: Mapping[str, Any] | None = None,
) -> Difference:
    """Find the first step at which two runs differ.

    The journals of the runs show the first step at which samples, loss or gradient norm differ. If the journals show no
    difference, the result is the first step after which both runs saved checkpoints with different weights.

    With a program, both runs are replayed up to the step that was found, and their weights are compared after each
    step. The replays start from the last checkpoint that is equal in both runs, or from the beginning. Nothing is
    replayed if no difference was found, or if the samples differ.

    Args:
        run_a: The folder or the history of the first run.
        run_b: The folder or the history of the second run.
        program: The operator class of the runs, or its location, such as "train.py:MyOperator". Default: compare only
            the files, and replay nothing.
        program_b: The operator class of the second run, or its location, if it differs from `program`.
        config: Config entries that are missing from the journals.

    Raises:
        FileNotFoundError: A run has no journal.
        ValueError: The runs have no step in common, or cannot be replayed. The message gives the reason.
    """
    first, second = journal_of(run_a), journal_of(run_b)
    common = sorted({*first.numbers()} & {*second.numbers()})
    if not common:
        raise ValueError("the runs have no step in common.")
    equal_at, different_at = _compared_checkpoints(first, second, common[-1])
    found = _first_in_journals(first, second, common) or Difference(None)
    # If a loss or norm differs, replays up to that step find the first step, and which run left its program.
    is_by_files = program is None or found.what in (None, SAMPLES)
    if different_at is not None and is_by_files and (found.step is None or different_at < found.step):
        found = Difference(different_at, WEIGHTS)
    beside: dict[str, Any] = {"num_steps": len(common), "equal_at": equal_at, "different_at": different_at}
    if program is None or found.step is None or found.what == SAMPLES:
        return Difference(found.step, found.what, values=found.values, **beside)
    exact = _by_replays(first, second, found, equal_at or 0, (program, program_b or program), config)
    return Difference(exact.step, exact.what, exact.parameter, exact.left, exact.values, was_replayed=True, **beside)


def _first_in_journals(first: Journal, second: Journal, common: list[int]) -> Difference | None:
    for step in common:
        if range_of(first, step) != range_of(second, step):
            return Difference(step, SAMPLES)
        one, other = first.check_step(step), second.check_step(step)
        found = _differing(one, other)
        if found is not None:
            return Difference(step, found, values=(getattr(one, found), getattr(other, found)))
    return None


def _differing(one: StepRecord, other: StepRecord) -> str | None:
    """Compare the records of a step in two runs. Return "loss" or "norm" if it differs, otherwise None.

    Losses are compared only if both mean losses have the same weight. The weight is lower if a worker was lost before
    the driver had this worker's part of the loss.
    """
    if one.weight == other.weight and not _is_same(one.loss, other.loss):
        return LOSS
    both = one.norm is not None and other.norm is not None
    return NORM if both and not _is_same(one.norm, other.norm) else None


def _is_same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)


def _compared_checkpoints(first: Journal, second: Journal, until: int) -> tuple[int | None, int | None]:
    """Compare the weights in checkpoints that both runs saved after the same step, up to the first that differ.

    Args:
        first: Journal of the first run.
        second: Journal of the second run.
        until: The last step to compare.

    Returns:
        A pair of steps: the last step after which the weights are equal, before any difference; and the first step
        after which the weights differ. Each is None if there is no such step.
    """
    equal_at = different_at = None
    for step in sorted({*first.checkpoints} & {*second.checkpoints}):
        weights = [_weights_at(each, step) for each in (first, second)]
        if step > until or any(each is None for each in weights):
            continue
        if _digests(weights[0]) != _digests(weights[1]):
            different_at = step
            break
        equal_at = step
    return equal_at, different_at


def _weights_at(journal: Journal, step: int) -> Any:
    """Return the weights in the checkpoint that a run saved after a step.

    Return None if the checkpoint was deleted, is in remote storage, or is a folder instead of a file.
    """
    path = journal.folder / journal.checkpoints[step]
    return checkpoint_file.read(path)["models"] if "://" not in journal.checkpoints[step] and path.is_file() else None


def _digests(models: Any) -> dict[str, bytes]:
    return {
        f"{number}.{name}" if len(models) > 1 else name: _digest(tensor)
        for number, model in enumerate(models)
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }


def _digest(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).digest()


class _WeightsOfSteps(WorkerCallback):
    """Worker callback that records a hash of each parameter and buffer after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, bytes]] = {}

    def __deepcopy__(self, memo: Any) -> _WeightsOfSteps:
        return self  # no copy: the replay runs in this process, which reads `after` later

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        self.after[step] = _digests([model.state_dict() for model in models_of(operator)])


def _by_replays(
    first: Journal,
    second: Journal,
    found: Difference,
    begin: int,
    programs: tuple[Any, Any],
    config: Mapping[str, Any] | None,
) -> Difference:
    assert found.step is not None, "there is a difference"
    weights, replayed = (_WeightsOfSteps(), _WeightsOfSteps()), list[Replayed]()
    for journal, program, noting in zip((first, second), programs, weights, strict=True):
        replayed.append(
            replay(journal.folder, found.step, program=program, config=config, begin=begin, worker_callbacks=(noting,))
        )
    one, other = (each.after for each in weights)
    for step in sorted({*one} & {*other}):
        if one[step] != other[step]:
            name = next(name for name in one[step] if one[step][name] != other[step].get(name))
            is_seen = step == found.step and found.what in (LOSS, NORM)
            return Difference(step, found.what if is_seen else WEIGHTS, name, values=found.values if is_seen else None)
    left = [name for name, each in zip("AB", replayed, strict=True) if each.first_different is not None]
    if len(left) != 1:
        return found
    seen = replayed["AB".index(left[0])].first_different
    # A step computes its loss with the weights after the previous step. If the loss differs, these weights differ, too.
    if found.what == LOSS and seen == found.step:
        earlier = [number for number in first.numbers() if number < found.step]
        return Difference(earlier[-1], WEIGHTS, left=left[0]) if earlier else Difference(found.step, LOSS, left=left[0])
    return Difference(found.step, found.what, left=left[0], values=found.values)
