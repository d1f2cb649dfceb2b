"""Writes and reads the two files of a journal, the record of a run's steps. Reading runs no code from the files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysgd.core.files import inside

FOLDER, LINES_FILE, STEPS_FILE = "journal", "journal.jsonl", "steps.bin"
RUN, LEG, CHECKPOINT, GAP = "run", "leg", "checkpoint", "gap"
FORMAT = 1
NO_NORM, NO_LOSS = -1.0, -1.0
STEPS = np.dtype([("loss", "<f8"), ("norm", "<f4"), ("weight", "<f4")])
Steps = np.ndarray[Any, np.dtype[Any]]

Line = Mapping[str, Any]


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


@dataclass(frozen=True)
class Leg:
    """A leg: a part of an epoch that one group of workers ran.

    Attributes:
        after: Number of the step after which the leg starts.
        entry: The line of the journal that describes the leg.
        run: The line of the journal that describes the program that ran the leg.
        until: Number of the last step of the leg.
    """

    after: int
    entry: Line
    run: Line
    until: int

    @property
    def epoch(self) -> int:
        """Number of the epoch that the leg is a part of, from 1."""
        return int(self.entry["pass"]) + 1


class JournalWriter:
    """Writes the journal of a run. When the run goes back to an earlier step, records of later steps are replaced.

    Args:
        folder: The folder of the run.
        header: The line of the journal that describes this program, without `kind` and `format`.

    Raises:
        OSError: A link leads out of the folder.
    """

    def __init__(self, folder: Path, header: Line) -> None:
        self._folder, self._header = folder / FOLDER, header
        for name in (LINES_FILE, STEPS_FILE):
            inside(folder, f"{FOLDER}/{name}")
        self._has_begun = False

    def begin_leg(self, entry: Line) -> None:
        """Record that a group of workers starts to train after a step, and remove earlier records of later steps.

        Args:
            entry: The line for the journal, without `kind`. Its entry "step" is the number of that step.

        Raises:
            OSError: A file cannot be written.
        """
        after = int(entry["step"])
        self._folder.mkdir(parents=True, exist_ok=True)
        lines, steps = self._folder / LINES_FILE, self._folder / STEPS_FILE
        if not self._has_begun:
            if after == 0:  # a run that starts at step 0 replaces the journal of an earlier run in this folder
                lines.unlink(missing_ok=True)
            self._append({"kind": RUN, "format": FORMAT, **self._header})
            self._has_begun = True
        steps.touch()
        if steps.stat().st_size > after * STEPS.itemsize:
            with steps.open("r+b") as file:
                file.truncate(after * STEPS.itemsize)
        self._append({"kind": LEG, **entry})

    def write_steps(self, numbers: np.ndarray[Any, np.dtype[Any]], records: Steps) -> None:
        """Write the records of some steps. Records of other steps stay as they are.

        Args:
            numbers: The numbers of the steps, in ascending order.
            records: Loss, norm and weight of each of these steps.

        Raises:
            OSError: The file cannot be written.
        """
        after = int(numbers[0]) - 1
        block = np.zeros(int(numbers[-1]) - after, STEPS)  # a weight of 0 means that there is no step
        with (self._folder / STEPS_FILE).open("r+b") as file:
            file.seek(after * STEPS.itemsize)
            earlier = _as_steps(file.read(block.nbytes))
            block[: len(earlier)] = earlier
            block[numbers - numbers[0]] = records
            file.seek(after * STEPS.itemsize)
            file.write(block.tobytes())

    def note_checkpoint(self, location: str, step: int) -> None:
        """Record that a checkpoint was saved after a step. Do nothing before the first call to `begin_leg`.

        Args:
            location: Path or URI of the checkpoint. A path inside the folder of the run is relative to this folder.
            step: Number of the step.

        Raises:
            OSError: The file cannot be written.
        """
        if self._has_begun:
            self._append({"kind": CHECKPOINT, "step": step, "location": location})

    def note_gap(self, first: int, last: int) -> None:
        """Record that reports about steps from `first` to `last` were lost.

        Do nothing before the first call to `begin_leg`.

        Raises:
            OSError: The file cannot be written.
        """
        if self._has_begun:
            self._append({"kind": GAP, "first_step": first, "last_step": last})

    def _append(self, line: Line) -> None:
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
        checkpoints: Paths or URIs of checkpoints, by the step after which they were saved. Relative paths are
            relative to the folder of the run.
        steps: Mean loss, gradient norm, and weight of the mean loss (such as the number of samples) by batch number, as
            a structured array. The weight is 0 for a batch that does not end a step.

    Raises:
        FileNotFoundError: The folder has no journal.
        ValueError: The journal is damaged, or another version of raysgd wrote it in a different format.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        place = self.folder / FOLDER
        if not (place / LINES_FILE).is_file():
            raise FileNotFoundError(
                f"`{folder}` has no journal. `TorchTrainer.fit` keeps one if you pass `folder=...`, or if a callback "
                "writes to the folder of the run; `TFTrainer` keeps none."
            )
        self.steps = _read_steps(place / STEPS_FILE)
        legs, self.checkpoints = list[tuple[int, Line, Line]](), dict[int, str]()
        self._gap_ends = list[int]()  # numbers of steps at which a range of steps without records ends
        run: Line = {}
        try:
            for line in _lines(place / LINES_FILE):
                if line["kind"] == RUN:
                    run = line
                    _check_format(line)
                elif line["kind"] == CHECKPOINT:
                    self.checkpoints[int(line["step"])] = str(line["location"])
                elif line["kind"] == GAP:
                    self._gap_ends.append(int(line["last_step"]))
                elif line["kind"] == LEG:
                    after = int(line["step"])
                    self._gap_ends = [end for end in self._gap_ends if end <= after]
                    legs = [each for each in legs if each[0] < after]
                    self.checkpoints = {step: at for step, at in self.checkpoints.items() if step <= after}
                    legs.append((after, line, run))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"`{place / LINES_FILE}` is damaged: {error!r}.") from error
        ends = [*(after for after, _, _ in legs), len(self.steps)][1:]
        self.legs = [Leg(*leg, until) for leg, until in zip(legs, ends, strict=True)]

    @property
    def last_step(self) -> int:
        """Number of the last step, or 0 if the journal has no steps."""
        taken = np.flatnonzero(self.steps["weight"])
        return int(taken[-1]) + 1 if len(taken) else 0

    def step(self, number: int) -> StepRecord | None:
        """Return the record of a step, or None if the journal has no step with this number."""
        if not 1 <= number <= len(self.steps) or not self.steps["weight"][number - 1]:
            return None
        loss, norm, weight = self.steps[number - 1].tolist()
        return StepRecord(number, loss, None if norm == NO_NORM else norm, weight)

    def numbers(self) -> list[int]:
        """Return the numbers of all steps in the journal, in ascending order."""
        return [int(place) + 1 for place in np.flatnonzero(self.steps["weight"])]

    def check_step(self, number: int) -> StepRecord:
        """Return the record of a step.

        Raises:
            ValueError: The journal has no step with this number.
        """
        found = self.step(number)
        if found is not None:
            return found
        numbers = self.numbers()
        if not numbers:
            obstacle = next((each.entry["obstacle"] for each in self.legs if each.entry.get("obstacle")), None)
            raise ValueError(f"The journal has no steps{'' if obstacle is None else f': {obstacle}'}.")
        near = min(numbers, key=lambda each: (abs(each - number), each))
        raise ValueError(
            f"`--step {number}`: the journal has steps {numbers[0]} to {numbers[-1]}, and none with this number. "
            f"The nearest is {near}."
        )

    def leg_of(self, number: int) -> Leg:
        """Return the leg that contains a step. A leg is a part of an epoch that one group of workers ran."""
        return next(each for each in reversed(self.legs) if each.after < number)

    def begin_of(self, number: int) -> int:
        """Return the number of the batch before the first batch of a step.

        With gradient accumulation, a step has several batches. Return 0 for the first step of the run.
        """
        leg = self.leg_of(number)
        taken = np.flatnonzero(self.steps["weight"][leg.after : number - 1])
        begin = leg.after + (int(taken[-1]) + 1 if len(taken) else 0)
        return max(begin, *(end for end in self._gap_ends if end < number), 0)


def _read_steps(path: Path) -> Steps:
    return _as_steps(path.read_bytes() if path.is_file() else b"")


def _as_steps(content: bytes) -> Steps:
    return np.frombuffer(content[: len(content) // STEPS.itemsize * STEPS.itemsize], STEPS)


def _lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal. A line without a line break was not written completely, and is left out."""
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of `{path}` is damaged: {error}.") from error
        yield line


def _check_format(line: Line) -> None:
    if line["format"] != FORMAT:
        raise ValueError(
            f"The journal has format {line['format']}, and this version of raysgd reads format {FORMAT}: use the "
            f"version that wrote it, {line.get('raysgd')}."
        )
