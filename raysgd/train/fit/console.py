"""Output of a run while it runs: lines on the screen, a progress reporter of Ray Tune, files with what is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from raysgd.air.reports import FILLED_IN
from raysgd.air.result import flattened
from raysgd.air.trial import FitTrialView

_TABLES = 3  # how much reporters of Ray Tune print by default


class ConsoleReporter:
    """A callback that prints what happens: `RunConfig(verbose=...)`.

    Args:
        verbose: 1 for where the run is and how it ends, 2 for attempts and checkpoints as well, 3 for each report.
    """

    def __init__(self, verbose: int) -> None:
        self._verbose = verbose
        self._num_starts = 0

    def on_trial_start(self, trial: FitTrialView) -> None:
        self._num_starts += 1
        if self._num_starts == 1:
            self._say(1, trial, f"running; results in {trial.path}")
        else:
            self._say(2, trial, f"attempt {self._num_starts}")

    def on_trial_result(self, trial: FitTrialView, result: Mapping[str, Any]) -> None:
        shown = {key: value for key, value in result.items() if key not in FILLED_IN}
        text = ", ".join(f"{name}={_short(value)}" for name, value in flattened(shown).items())
        self._say(3, trial, f"report {result['training_iteration']}: {text}")

    def on_checkpoint(self, trial: FitTrialView, checkpoint: Any) -> None:
        self._say(2, trial, f"checkpoint {Path(str(checkpoint.path)).name}")

    def on_trial_complete(self, trial: FitTrialView) -> None:
        self._say(1, trial, f"finished after {trial.last_result.get('training_iteration', 0)} reports")

    def on_trial_error(self, trial: FitTrialView) -> None:
        self._say(1, trial, f"failed; see {trial.error_file}")

    def _say(self, verbose: int, trial: FitTrialView, text: str) -> None:
        if self._verbose >= verbose:
            print(f"{trial}: {text}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:80]


class Reporter:
    """A callback that drives a `ray.tune.ProgressReporter`: `RunConfig(progress_reporter=...)`.

    Args:
        reporter: The reporter.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, reporter: Any) -> None:
        if isinstance(reporter, type) or not (hasattr(reporter, "should_report") and hasattr(reporter, "report")):
            raise TypeError(
                f"`RunConfig(progress_reporter={reporter!r})`: need an object of a subclass of "
                "`ray.tune.ProgressReporter`, such as `ray.tune.CLIReporter()`."
            )
        self.adapted = reporter  # whose name errors show

    def setup(self) -> None:
        log = sys.modules.get("ray.tune.utils.log")
        if log is not None:
            log.set_verbosity(_TABLES)  # of the process: a `Tuner(..., verbose=0)` before this run leaves it at 0
        if hasattr(self.adapted, "setup"):
            self.adapted.setup(start_time=time.time(), total_samples=1)

    def on_step_end(self, trials: list[FitTrialView]) -> None:
        self._report(trials, done=False)

    def on_trial_complete(self, trials: list[FitTrialView]) -> None:
        self._report(trials, done=True)

    def on_trial_error(self, trials: list[FitTrialView]) -> None:
        self._report(trials, done=True)

    def _report(self, trials: list[FitTrialView], done: bool) -> None:
        if self.adapted.should_report(trials, done=done):
            self.adapted.report(trials, done)


class LogFiles:
    """Copies what this process prints to files while a run runs: `RunConfig(log_to_file=...)`.

    What workers print is in there as far as Ray shows it in the driver.

    Args:
        log_to_file: False for no files; True for `stdout` and `stderr`; a name for one file, two names for two.

    Raises:
        TypeError: It is something else.
        ValueError: A name that leads out of the trial's folder.
    """

    def __init__(self, log_to_file: Any) -> None:
        self._names = _file_names(log_to_file)
        self._tees: list[tuple[str, TextIO, _Tee]] = []

    @property
    def names(self) -> tuple[str | None, str | None]:
        """The files for standard output and for errors."""
        return self._names

    def start(self, folder: Path) -> None:
        """Begins to copy into files in this folder."""
        for stream, name in zip(("stdout", "stderr"), self._names, strict=True):
            if name is not None:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                tee = _Tee(getattr(sys, stream), open(path, "a", encoding="utf-8"))  # noqa: SIM115
                self._tees.append((stream, getattr(sys, stream), tee))
                setattr(sys, stream, tee)

    def stop(self) -> None:
        """Ends that."""
        while self._tees:
            stream, original, tee = self._tees.pop()
            if getattr(sys, stream) is tee:  # else someone else took its place
                setattr(sys, stream, original)
            tee.file.close()


class _Tee:
    """A stream that also writes to a file."""

    def __init__(self, stream: TextIO, file: IO[str]) -> None:
        self._stream = stream
        self.file = file

    def write(self, text: str) -> int:
        if not self.file.closed:
            self.file.write(text)
            self.file.flush()
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _file_names(log_to_file: Any) -> tuple[str | None, str | None]:
    if log_to_file is None or log_to_file is False:
        return None, None
    if log_to_file is True:
        return "stdout", "stderr"
    names = (log_to_file, log_to_file) if isinstance(log_to_file, str) else log_to_file
    if not isinstance(names, tuple | list) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`RunConfig(log_to_file={log_to_file!r})`: need True, the name of one file, or the names of two, for "
            "standard output and for errors."
        )
    for name in names:
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"`RunConfig(log_to_file={log_to_file!r})`: need names of files in the trial's folder, without `..`."
            )
    return names[0], names[1]
