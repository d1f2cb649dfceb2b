"""`bisect`: finds the first step at which two runs differ, and what differs there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raysgd.callbacks.worker_callback import WorkerCallback, models_of
from raysgd.core.history.history import History
from raysgd.journal.entries import Leg
from raysgd.journal.journal import Journal, journal_of
from raysgd.replay.comparing import (
    LOSS,
    NORM,
    Comparison,
    compare,
    records_of,
    rounding_of,
    sizes_of,
)
from raysgd.replay.program import batch_options_for, checkpoint_in_run, options_of
from raysgd.replay.questions import range_of
from raysgd.replay.replaying import Replayed, replay
from raysgd.torch.checkpoints import checkpoint_file

SAMPLES, WEIGHTS = "samples", "weights"
_EXACT = "both runs have `deterministic=True` and the same `num_workers`"
_OTHER_WORKERS = f"the runs had {{}} and {{}} workers: dropout and batch norms are the same only if {_EXACT}"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: The first step that differs, or None if all steps are equal.
        what: What differs: "samples", "loss", "norm", or "weights" (the weights after the step). None if all steps are
            equal.
        parameter: Name of the first parameter or buffer that differs after the step. None if the runs were not
            replayed, or if the replays have equal weights.
        left: The run, "A" or "B", that differs from its own replay, if only one of them does. Otherwise, None.
        values: The losses or norms of the step in run A and in run B, or None.
        num_steps: Number of steps that are in both journals.
        equal_at: The last step after which both runs saved a checkpoint with the same weights. If `different_at` is
            set, only earlier steps count. None if there is no such step.
        different_at: The first step after which both runs saved a checkpoint, but the weights differ in a bit. None if
            there is no such step.
        was_replayed: True if the steps were replayed.
        comparison: How the losses and norms in the two journals differ in the steps before the samples differ, as a
            `Comparison`.
        advice: What else the replays have shown, and what to pass to find more. "" if there is nothing to say.
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
    comparison: Comparison | None = None
    advice: str = ""

    def __str__(self) -> str:
        """Return a description of the difference as text."""
        lines, found = [], self.comparison
        if self.step is None:
            beyond = "" if found is None or found.bits_at is None else " that rounding does not explain"
            lines.append(f"no difference in {self.num_steps} steps{beyond}")
        elif self.what == WEIGHTS:
            named = "" if self.parameter is None else f", first in `{self.parameter}`"
            lines.append(f"step {self.step}: the weights after it differ{named}")
        else:
            values = "" if self.values is None else f": {self.values[0]!r} in A, {self.values[1]!r} in B"
            named = "" if self.parameter is None else f"; after it, the weights differ first in `{self.parameter}`"
            lines.append(
                f"step {self.step}: the {self.what} differ{'' if self.what == SAMPLES else 's'}{values}{named}"
            )
        if found is not None and found.bits_at is not None and self.step is None:
            lines.append(
                f"the bits differ from step {found.bits_at} on, up to {found.largest:.2g} of a loss, {found.cause}: "
                f"all bits are compared if {_EXACT}"
            )
        elif found is not None and found.bits_at is not None and found.bits_at < (self.step or 0):
            lines.append(f"rounding explains the other bits from step {found.bits_at} on")
        if found is not None and found.incomplete:
            steps = ", ".join(map(str, found.incomplete))
            lines.append(f"not compared, because the means of the runs have different weights: {steps}")
        if self.left is not None:
            lines.append(f"run {self.left} left its own program there: its replay is equal to that of the other run")
        if self.advice:
            lines.append(self.advice)
        if self.what == LOSS and not self.was_replayed:
            lines.append(
                "the samples have the same places: they hold something else, or the weights before the step differ; "
                "`--program` trains the steps again and says which"
            )
        if self.equal_at is not None:
            lines.append(f"checkpoints: the same weights after step {self.equal_at}")
        if self.different_at is not None:
            lines.append(f"checkpoints: different bits in the weights after step {self.different_at}")
        return "\n".join(lines)


def bisect(
    run_a: str | os.PathLike[str] | History,
    run_b: str | os.PathLike[str] | History,
    *,
    program: Any = None,
    program_b: Any = None,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Difference:
    """Find the first step at which two runs differ.

    The journals of the runs show the first step at which the samples differ, or at which loss or gradient norm differ
    more than rounding explains. If both runs split their global batches alike, with `deterministic=True`, all bits
    must be equal, and if the journals show no difference, the result is the first step after which both runs saved
    checkpoints with different weights.

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
        options: Arguments of the trainer that are missing from the journals, such as a dict for `compile`.

    Raises:
        FileNotFoundError: A run has no journal.
        ValueError: The runs have no step in common, or cannot be replayed. The message gives the reason.
    """
    first, second = journal_of(run_a), journal_of(run_b)
    common = sorted({*first.numbers()} & {*second.numbers()})
    if not common:
        raise ValueError("the runs have no step in common.")
    equal_at, different_at = _compared_checkpoints(first, second, common[-1])
    splits = {options_of(leg) for each in (first, second) for leg in each.legs if leg.after < common[-1]}
    are_exact = len(splits) == 1 and all(each.deterministic for each in splits)
    found, comparison = _first_in_journals(first, second, common, are_exact)
    # If a loss or norm differs, replays up to that step find the first step, and which run left its program.
    is_by_files = are_exact and (program is None or found.what in (None, SAMPLES))
    if different_at is not None and is_by_files and (found.step is None or different_at < found.step):
        found = Difference(different_at, WEIGHTS)
    if program is not None and found.step is not None and found.what != SAMPLES:
        begin = min(equal_at or 0, found.step - 1)
        replayed = _by_replays(first, second, found, begin, (program, program_b or program), config, options)
        found = replace(replayed, was_replayed=True)
    if comparison.rounding is not None and found.what in (LOSS, NORM) and found.step is not None and not found.advice:
        one, other = (each.leg_of(found.step).num_workers for each in (first, second))
        found = replace(found, advice="" if one == other else _OTHER_WORKERS.format(one, other))
    beside: dict[str, Any] = {"num_steps": len(common), "equal_at": equal_at, "different_at": different_at}
    return replace(found, comparison=comparison, **beside)


def _first_in_journals(
    first: Journal, second: Journal, common: list[int], are_exact: bool
) -> tuple[Difference, Comparison]:
    """Return the first difference that the journals show, and the comparison of the steps with equal samples."""
    end = next((at for at, step in enumerate(common) if range_of(first, step) != range_of(second, step)), len(common))
    rounding = rounding_of([*first.legs, *second.legs], are_exact=are_exact)
    one, other = (records_of(each, common[:end]) for each in (first, second))
    comparison = compare(one, other, rounding, sizes_of(first))
    if comparison.step is not None:
        return Difference(comparison.step, comparison.what, values=comparison.values), comparison
    if end < len(common):
        return Difference(common[end], SAMPLES), comparison
    return Difference(None), comparison


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
    """Return the weights in the checkpoint that a run saved after a step, without the statistics of batch norms.

    Return None if the checkpoint was deleted, is not in the folder of the run, or is a folder instead of a file.

    Raises:
        ValueError: The checkpoint is damaged, or its models have tensors of a kind that cannot be compared.
    """
    path = checkpoint_in_run(journal, step)
    if path is None or not os.path.isfile(path):
        return None
    models = checkpoint_file.read(path).get("models")
    if not isinstance(models, list) or not all(map(_is_comparable, models)):
        raise ValueError(f"`{path}`: its models are not a list of dicts of dense tensors, so they cannot be compared.")
    return _without_statistics(models)


def _is_comparable(model: Any) -> bool:
    """Return True if a model in a file is a dict, and all its tensors have bytes to compare."""
    return isinstance(model, Mapping) and all(
        isinstance(name, str)
        and not (
            isinstance(each, torch.Tensor)
            and (each.layout is not torch.strided or each.is_quantized or each.device.type == "meta")
        )
        for name, each in model.items()
    )


def _without_statistics(models: Any) -> list[dict[str, Any]]:
    """Leave out what each process computes from its own batches, which depends on the number of workers."""
    return [{name: each for name, each in model.items() if not name.endswith(_STATISTICS)} for model in models]


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
    options: Mapping[str, Any] | None,
) -> Difference:
    """Replay both runs up to a step, and find out whether their programs differ, or a run and its own program.

    Args:
        first: Journal of run A.
        second: Journal of run B.
        found: What the journals show.
        begin: The step after which both replays start.
        programs: The programs of run A and run B.
        config: Config entries that are missing from the journals.
        options: Arguments of the trainer that are missing from the journals.
    """
    step, weights, replays = found.step, (_WeightsOfSteps(), _WeightsOfSteps()), list[Replayed]()
    assert step is not None, "there is a difference"
    for journal, program, noting in zip((first, second), programs, weights, strict=True):
        given: dict[str, Any] = {"config": config, "options": options, "worker_callbacks": (noting,)}
        replays.append(replay(journal.folder, step, program=program, begin=begin, **given))
    legs = [leg for journal in (first, second) for leg in journal.legs if leg.after < step]
    difference = _of_replays(replays, weights, legs, sizes_of(first))
    if difference is not None:
        is_seen = difference.step == step and found.what in (LOSS, NORM)
        return replace(found, parameter=difference.parameter) if is_seen else difference
    differing = {
        name: at
        for name, journal, replayed in zip("AB", (first, second), replays, strict=True)
        if (at := _left_at(journal, replayed, of_weights=found.what == WEIGHTS)) is not None
    }
    if not differing:
        return Difference(None, advice=_IS_ROUNDING.format(step))
    # A run with other numbers than its replay in the first step has a model whose numbers a replay does not repeat.
    is_at_once = any(replayed.first_different == replayed.records[0].step for replayed in replays)
    if len(differing) == 2 or (is_at_once and any(replayed.comparison.rounding for replayed in replays)):
        places = " and ".join(f"run {name} differs from its replay from step {at} on" for name, at in differing.items())
        return replace(found, advice=f"the replays of both runs are equal, but {places}: {_NOT_REPEATED}")
    [(left, at)] = differing.items()
    # A step computes its loss with the weights after the previous step. If the loss differs, these weights differ, too.
    if found.what == LOSS and at == step:
        earlier = [number for number in first.numbers() if number < step]
        return Difference(earlier[-1], WEIGHTS, left=left) if earlier else Difference(step, LOSS, left=left)
    return replace(found, left=left)


_NOT_REPEATED = (
    "a replay has the dropout and the batch norms of several workers only with `deterministic=True`, and never what "
    "callbacks change"
)
_IS_ROUNDING = (
    "the losses or norms of step {} differ, but the replays of both runs are equal, and each run equals its replay up "
    f"to rounding: all bits are compared if {_EXACT}"
)


def _of_replays(
    replays: Sequence[Replayed],
    weights: tuple[_WeightsOfSteps, _WeightsOfSteps],
    legs: Sequence[Leg],
    sizes: Sequence[float],
) -> Difference | None:
    """Return the first difference between the replays of two runs, or None.

    Args:
        replays: The replays of both runs.
        weights: The hashes of the weights after each step of the replays.
        legs: The parts of epochs that were replayed, of both runs.
        sizes: The usual size of the losses and norms.
    """
    options = {batch_options_for(leg) for leg in legs}
    is_exact = all(each.deterministic for each in options) or not any(leg.run.options.use_gpu for leg in legs)
    if len(options) > 1 or not is_exact:
        # One process adds the parts of the batches of both runs in different orders, so the bits of the weights differ.
        common = {each.step for each in replays[0].records} & {each.step for each in replays[1].records}
        first, second = ([each for each in replayed.records if each.step in common] for replayed in replays)
        found = compare(first, second, rounding_of(legs, are_exact=False), sizes)
        return None if found.step is None else Difference(found.step, found.what, values=found.values)
    one, other = (each.after for each in weights)
    step = next((step for step in sorted({*one} & {*other}) if one[step] != other[step]), None)
    if step is None:
        return None
    return Difference(step, WEIGHTS, next(name for name in one[step] if one[step][name] != other[step].get(name)))


def _left_at(journal: Journal, replayed: Replayed, *, of_weights: bool) -> int | None:
    """Return the first step at which a run differs from its own replay more than rounding explains, or None.

    Args:
        journal: Journal of the run.
        replayed: The replay.
        of_weights: True to also compare the weights after the last step of the replay with the run's checkpoint.
    """
    if replayed.is_same and of_weights:
        after = _digests(_weights_at(journal, replayed.step)), _digests(_without_statistics(replayed.state["models"]))
        return replayed.step if after[0] != after[1] else None
    return replayed.first_different
