"""`why` and `find_jumps`: what the journal of a run shows about one step, and about the loss of the whole run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysgd.core.history.history import History
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.journal import jumps
from raysgd.journal.entries import LeftOutLine
from raysgd.journal.journal import Journal, StepRecord
from raysgd.journal.jumps import Jump
from raysgd.replay.program import Program
from raysgd.replay.samples import NeedsProgramError, SampleLoss, data_of, recomputed, samples_of

_AROUND = 4
_MOST_SAMPLES = 20


@dataclass(frozen=True)
class Why:
    """The result of `why`: what the journal of the run shows about one step.

    Attributes:
        record: The loss and the gradient norm of the step.
        around: The records of the step and of nearby steps, in the order of steps.
        epoch: Number of the epoch in which the step was taken, from 1.
        num_workers: Number of workers that took the step.
        left_out: Why `Guard` left the step out: a line for each optimizer that did not step. Empty for other steps.
        samples: The samples that each rank trained on: dataset indices, or `StreamRow(shard, row)` for a stream. None
            if they are unknown.
        obstacle: Reason why the samples are unknown, if `samples` is None.
        losses: The loss of each sample by itself: first NaN, then from highest to lowest. None without
            `recompute=True`.
        checkpoint: The checkpoint whose weights were used to compute `losses`. None if the initial weights from
            `setup` were used, or without `recompute=True`.
    """

    record: StepRecord
    around: tuple[StepRecord, ...]
    epoch: int
    num_workers: int
    samples: tuple[tuple[Any, ...], ...] | None
    obstacle: str | None = None
    losses: tuple[SampleLoss, ...] | None = None
    checkpoint: str | None = None
    left_out: tuple[LeftOutLine, ...] = ()

    def __str__(self) -> str:
        """Return everything about the step as text with tables."""
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        lines = [f"step {self.record.step}, in epoch {self.epoch}, on {workers}", *map(str, self.left_out), ""]
        lines += _table(
            ["", "step", "loss", "norm", "weight"],
            [
                [
                    ">" if each.step == self.record.step else "",
                    str(each.step),
                    f"{each.loss:.6g}",
                    "" if each.norm is None else f"{each.norm:.4g}",
                    "no loss" if each.weight < 0 else f"{each.weight:g}",
                ]
                for each in self.around
            ],
        )
        lines.append("")
        if self.samples is None:
            lines.append(f"samples: {self.obstacle}")
        for rank, own in enumerate(self.samples or ()):
            lines.append(f"rank {rank}: {', '.join(printable(str(each), None) for each in own) or 'no sample'}")
        if self.losses is not None:
            weights = masked(self.checkpoint or "`setup`, because no checkpoint before the step is left")
            lines += ["", f"loss of each sample by itself, with the weights of {printable(weights, None)}:", ""]
            rows = [
                [f"{each.loss:.6g}", printable(str(each.sample), None), str(each.rank)]
                for each in self.losses[:_MOST_SAMPLES]
            ]
            lines += _table(["loss", "sample", "rank"], rows)
            if len(self.losses) > _MOST_SAMPLES:
                lines.append(f"  ({len(self.losses) - _MOST_SAMPLES} more are lower)")
        return "\n".join(lines)


@dataclass(frozen=True)
class JumpsFound:
    """The steps at which the loss of a run left its usual range.

    Attributes:
        jumps: The jumps. `first` and `last` of each jump are step numbers, from 1.
        num_steps: Number of steps of the run that have a loss.
        left_out: The steps that `Guard` left out. They may also be jumps.
    """

    jumps: tuple[Jump, ...]
    num_steps: int
    left_out: tuple[LeftOutLine, ...] = ()

    def __str__(self) -> str:
        """Return a table of the jumps as text, then the steps that were left out."""
        return "\n".join([self._table(), *(f"step {each.step} was {each}" for each in self.left_out)])

    def _table(self) -> str:
        if not self.jumps:
            return f"no jumps in {self.num_steps} steps"
        rows = [
            [
                str(each.first),
                str(each.last) if each.last > each.first else "",
                f"{each.highest:.6g}",
                f"{each.usual:.4g}",
                f"{each.limit:.4g}",
            ]
            for each in self.jumps
        ]
        table = _table(["step", "until", "highest loss", "usual", "limit"], rows)
        return "\n".join([*table, "", f"{len(self.jumps)} of {self.num_steps} steps begin a jump"])


def why(
    run: str | os.PathLike[str] | History,
    step: int,
    *,
    program: Any = None,
    recompute: bool = False,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
) -> Why:
    """Look up a step of a run: its loss, the losses of neighboring steps, and the samples of each rank.

    Args:
        run: The folder or the history of the run.
        step: Number of the step, from 1, as in `metrics.steps.csv` and `global_step`.
        program: The operator class of the run, or its location, such as "train.py:MyOperator". Needed if the data was a
            stream or your own sampler, and with `recompute`. The `setup` of the class runs in this process.
        recompute: Whether to compute the loss of each sample by itself, in evaluation mode, with the weights of the
            nearest checkpoint before the step. If there is none, the initial weights from `setup` are used.
        config: Entries of the config that are missing in the journal: objects and secrets.
        options: Arguments of the trainer that are missing in the journal, such as a dict for `compile`.
        checkpoints: Path or URI of the folder with the checkpoints, if they are not in the folder of the run.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The run has no step with this number, the journal is damaged, the program does not match the run, or
            `recompute` is True without a `program`.
    """
    journal = journal_of(run)
    record, leg = journal.check_step(step), journal.leg_of(step)
    losses: tuple[SampleLoss, ...] | None = None
    obstacle, checkpoint, samples = None, None, None
    if recompute and program is None:
        raise ValueError("`recompute` needs the program of the run: pass `--program train.py:MyOperator`.")
    if recompute:
        found, of_step, checkpoint = recomputed(journal, step, Program(program, config, options), checkpoints)
        losses, samples = tuple(found), of_step.by_rank
    else:
        try:
            samples = samples_of(journal, step).by_rank
        except NeedsProgramError as error:
            obstacle = str(error)
            if program is not None:
                with Program(program, config, options).trainer(journal, leg) as trainer:
                    samples = samples_of(journal, step, data_of(trainer)).by_rank
                obstacle = None
        except ValueError as error:
            obstacle = str(error)
    around = tuple(_around(journal, step))
    left_out = tuple(each for each in journal.left_out if each.step == step)
    return Why(record, around, leg.epoch, leg.num_workers, samples, obstacle, losses, checkpoint, left_out)


def find_jumps(run: str | os.PathLike[str] | History) -> JumpsFound:
    """Find the steps at which the loss of a run left its usual range. `docs/replay.md` defines this range.

    Args:
        run: The folder or the history of the run.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The journal is damaged, or no step reported a loss.
    """
    journal = journal_of(run)
    places = np.flatnonzero(journal.steps["weight"] > 0)
    if not len(places):
        raise ValueError("The journal has no losses: no step reported a metric with `loss` in its name.")
    found = jumps.find_jumps(journal.steps["loss"][places].tolist())
    numbers = (places + 1).tolist()
    by_step = (Jump(numbers[each.first], numbers[each.last], each.highest, each.usual, each.limit) for each in found)
    return JumpsFound(tuple(by_step), len(numbers), tuple(journal.left_out))


def journal_of(run: str | os.PathLike[str] | History) -> Journal:
    """Return the journal of a run.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The journal is damaged.
    """
    if isinstance(run, History):
        if run.journal is None:
            raise FileNotFoundError(
                "the run of this history has no journal: pass `folder=...` to `fit`. A history that was read from "
                "JSON does not know it: pass the folder of the run."
            )
        return Journal(run.journal)
    return Journal(os.fspath(run))


def _around(journal: Journal, step: int) -> Sequence[StepRecord]:
    numbers = sorted({*journal.numbers(), step})
    place = numbers.index(step)
    return [journal.check_step(number) for number in numbers[max(0, place - _AROUND) : place + _AROUND + 1]]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [f"  {'  '.join(map(str.rjust, row, widths))}".rstrip() for row in [head, *rows]]
