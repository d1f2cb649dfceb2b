"""Writes and reads the files of a journal, the record of a run's steps. Reading runs no code from the files."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysgd.core.files import check_local, inside, is_inside
from raysgd.core.history.history import History
from raysgd.core.text.log_lines import printable
from raysgd.journal.entries import (
    LEG,
    RUN,
    CheckpointLine,
    GapLine,
    LeftOutLine,
    Leg,
    RunLine,
    read_line,
)
from raysgd.journal.steps import CHECKS_FILE, NO_NORM, STEPS, STEPS_FILE, Steps, cut_steps, read_steps, write_steps

FOLDER, LINES_FILE = "journal", "journal.jsonl"
FORMAT = 1
_MOST_BYTES = 2**28


@dataclass(frozen=True)
class StepRecord:
    """The record of one step of a run.

    Attributes:
        step: Number of the step: the number of its last batch on each worker, counted from 1 over all epochs.
        loss: Mean loss over all samples of the step, or NaN if the step has no loss.
        norm: Norm of the gradients before clipping, or None if no norm was recorded. With several optimizers, the
            largest of their norms.
        weight: Weight of the mean loss, such as the number of samples, or -1 if the step has no loss.
    """

    step: int
    loss: float
    norm: float | None
    weight: float


class JournalWriter:
    """Writes the journal of a run. When the run goes back to an earlier step, records of later steps are replaced.

    Args:
        folder: The folder of the run.
        header: The line of the journal that describes this program, without `kind` and `format`.
        continues: True if the journal in the folder has the earlier steps of this run. Otherwise, the journal is of
            another run, and is replaced.

    Raises:
        OSError: A link leads out of the folder, or a file cannot be written.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], continues: bool = True) -> None:
        self._folder = folder / FOLDER
        files = [inside(folder, f"{FOLDER}/{name}") for name in (LINES_FILE, STEPS_FILE, CHECKS_FILE)]
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in () if continues else files:
            file.unlink(missing_ok=True)
        self._append({"kind": RUN, "format": FORMAT, **header})

    def begin_leg(self, entry: Mapping[str, Any]) -> None:
        """Record that a group of workers starts to train after a step, and remove earlier records of later steps.

        Args:
            entry: The line for the journal, without `kind`. Its entry "step" is the number of that step.

        Raises:
            OSError: A file cannot be written.
        """
        cut_steps(self._folder, int(entry["step"]))
        self._append({"kind": LEG, **entry})

    def write_steps(self, numbers: np.ndarray[Any, np.dtype[Any]], records: Steps) -> None:
        """Write the records of some steps. Records of other steps stay as they are.

        Args:
            numbers: The numbers of the steps, in ascending order.
            records: Loss, norm and weight of each of these steps.

        Raises:
            OSError: The file cannot be written.
        """
        write_steps(self._folder, numbers, records)

    def note(self, kind: str, **entries: Any) -> None:
        """Add a line about a checkpoint, a gap, or a step that was left out.

        Args:
            kind: `CHECKPOINT`, `GAP` or `LEFT_OUT`.
            entries: The entries of the line. A path inside the folder of the run is relative to this folder.

        Raises:
            OSError: The file cannot be written.
        """
        self._append({"kind": kind, **entries})

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self._folder / LINES_FILE).open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            if file.read() not in (b"", b"\n"):  # a full disk or a kill has cut off the last line, so remove its rest
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(f"{json.dumps(line, allow_nan=False)}\n".encode())


class Journal:
    """The journal of a run, read from the files in the folder of the run.

    Args:
        folder: The folder of the run.

    Attributes:
        folder: The folder of the run.
        legs: The legs of the run, in the order of steps. A leg is a part of an epoch that one group of workers ran. If
            steps were repeated, only their last repetition is included.
        checkpoints: Paths or URIs of checkpoints, by the step after which they were saved, as the run wrote them. They
            may be anything. Use `raysgd.replay.program` to find the file.
        left_out: The steps that a callback left out, in the order of steps.
        steps: Mean loss, gradient norm, and weight of the mean loss (such as the number of samples) by batch number, as
            a structured array. The weight is 0 for a batch that does not end a step.

    Raises:
        FileNotFoundError: The folder has no journal.
        ValueError: The journal is damaged, or another version of raysgd wrote it in a different format.
    """

    def __init__(self, folder: str | Path) -> None:
        check_local("run", folder, "Copy the folder of the run to this machine.")
        self.folder = Path(folder).expanduser()
        place = self.folder / FOLDER
        if not (place / LINES_FILE).is_file():
            raise FileNotFoundError(
                f"`{folder}` has no journal. `TorchTrainer.fit` keeps one if you pass `folder=...`, or if a callback "
                "writes to the folder of the run; `TFTrainer` keeps none."
            )
        for path in (place / name for name in (LINES_FILE, STEPS_FILE, CHECKS_FILE)):
            if not is_inside(path, self.folder) or (path.exists() and not path.is_file()):
                raise ValueError(f"`{path}` is a link out of the folder of the run, or no regular file.")
        self.legs, self.checkpoints, self._gap_ends, self.left_out = _read_lines(place / LINES_FILE)
        try:
            self.steps = read_steps(place)
        except FileNotFoundError:
            if self.legs:
                raise ValueError(
                    f"`{place / STEPS_FILE}` is missing: it has the losses of the steps. Copy the whole folder of the "
                    "run."
                ) from None
            self.steps = np.zeros(0, STEPS)
        self._numbers = np.flatnonzero(self.steps["weight"]) + 1
        if len(self._numbers) and (not self.legs or self._numbers[0] <= self.legs[0].after):
            begin = f"begins after step {self.legs[0].after}" if self.legs else "is missing"
            raise ValueError(
                f"`{place}` is damaged: `{STEPS_FILE}` has step {self._numbers[0]}, and the line of the first leg in "
                f"`{LINES_FILE}` {begin}."
            )
        ends = [*(leg.after for leg in self.legs), len(self.steps)][1:]
        self.legs = [replace(leg, until=until) for leg, until in zip(self.legs, ends, strict=True)]
        self._begins = [leg.after for leg in self.legs]

    @property
    def last_step(self) -> int:
        """Number of the last step, or 0 if the journal has no steps."""
        return int(self._numbers[-1]) if len(self._numbers) else 0

    def step(self, number: int) -> StepRecord | None:
        """Return the record of a step, or None if the journal has no step with this number."""
        if not 1 <= number <= len(self.steps) or not self.steps["weight"][number - 1]:
            return None
        loss, norm, weight = self.steps[number - 1].tolist()
        return StepRecord(number, loss, None if norm == NO_NORM else norm, weight)

    def numbers(self) -> list[int]:
        """Return the numbers of all steps in the journal, in ascending order."""
        return self._numbers.tolist()

    def check_step(self, number: int) -> StepRecord:
        """Return the record of a step.

        Raises:
            ValueError: The journal has no step with this number.
        """
        found = self.step(number)
        if found is not None:
            return found
        is_left_out = bool(self.legs) and number in (each.step for each in self.left_out)
        if is_left_out and 0 < number - self.begin_of(number) <= self.leg_of(number).window:
            return StepRecord(number, float("nan"), None, -1.0)  # the step ended the run, so it has no record
        numbers = self.numbers()
        if not numbers:
            obstacle = next((leg.obstacle for leg in self.legs if leg.obstacle), None)
            raise ValueError(f"The journal has no steps{'' if obstacle is None else f': {obstacle}'}.")
        near = min(numbers, key=lambda each: (abs(each - number), each))
        raise ValueError(
            f"`--step {number}`: the journal has steps {numbers[0]} to {numbers[-1]}, and none with this number. "
            f"The nearest is {near}."
        )

    def leg_of(self, number: int) -> Leg:
        """Return the leg that contains a step. A leg is a part of an epoch that one group of workers ran."""
        return self.legs[bisect_left(self._begins, number) - 1]

    def begin_of(self, number: int) -> int:
        """Return the number of the batch before the first batch of a step.

        With gradient accumulation, a step has several batches. Return 0 for the first step of the run.
        """
        begins = (
            self._begins[bisect_left(self._begins, number) - 1],
            *self._numbers[: np.searchsorted(self._numbers, number)][-1:].tolist(),
            *self._gap_ends[: bisect_left(self._gap_ends, number)][-1:],
        )
        return max(begins)


def journal_of(run: str | os.PathLike[str] | History) -> Journal:
    """Return the journal of a run.

    Args:
        run: The folder or the history of the run.

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


def _read_lines(path: Path) -> tuple[list[Leg], dict[int, str], list[int], list[LeftOutLine]]:
    """Read all lines of a journal. A later leg replaces what earlier lines say about the steps after its beginning.

    Returns:
        The legs in the order of steps; the locations of the checkpoints by step; the last steps of the ranges of
        steps whose records may be missing, in ascending order; and the steps that were left out.

    Raises:
        ValueError: A line is damaged.
    """
    run: RunLine | None = None
    lines = list[Leg | CheckpointLine | GapLine | LeftOutLine]()
    for number, entries in _objects_in(path):
        if isinstance(entries, dict) and entries.get("kind") == RUN and entries.get("format") != FORMAT:
            raise ValueError(
                f"`{path}` has format {printable(repr(entries.get('format')))}, and this version of raysgd reads "
                f"format {FORMAT}: use the version that wrote it, {printable(str(entries.get('raysgd')))}."
            )
        try:
            line = read_line(entries, run)
        except ValueError as error:
            raise ValueError(f"line {number} of `{path}` is damaged: {error}.") from error
        if isinstance(line, RunLine):
            run = line
        else:
            lines.append(line)
    if run is None:
        raise ValueError(f"`{path}` is damaged: no line describes the program of the run.")
    legs, others, begin = list[Leg](), list[CheckpointLine | GapLine | LeftOutLine](), float("inf")
    for line in reversed(lines):
        if not isinstance(line, Leg):
            others += [line] if line.step <= begin else []
        elif line.after < begin:
            legs.append(line)
            begin = line.after
    others.sort(key=lambda each: each.step)
    checkpoints = {each.step: each.location for each in reversed(others) if isinstance(each, CheckpointLine)}
    gap_ends = [each.step for each in others if isinstance(each, GapLine)]
    return legs[::-1], dict(sorted(checkpoints.items())), gap_ends, [e for e in others if isinstance(e, LeftOutLine)]


def _objects_in(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the lines of a journal with their numbers. A line without a line break was cut off, and is left out."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"`{path}` is damaged: it has more than {_MOST_BYTES} bytes.")
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entries = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of `{path}` is damaged: {error}.") from error
        yield number, entries
