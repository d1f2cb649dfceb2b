"""Implements `raysgd status`: reads the status of a run from the files in the folder of the run.

The files may come from someone else. No code in them is run, and their contents are not trusted. Three kinds of folders
are recognized:

* the trial's folder of a `fit()` run of a `raysgd.train` trainer, or the experiment's folder above it;
* the `logdir` of a `raysgd.train.Trainer`, or the folder of one run in it, such as `run_001`;
* the `folder` of `raysgd.TorchTrainer.fit` or `raysgd.TFTrainer.fit`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from raysgd.air.reports import FILLED_IN
from raysgd.air.result import read_reports
from raysgd.callbacks.callback import RESULTS_FOLDER
from raysgd.callbacks.checkpointing import END, INDEX_FILE
from raysgd.callbacks.sidecar import ENDING, Sidecar, Sidecars, place_of
from raysgd.core.history import readable
from raysgd.core.history.history import History
from raysgd.core.text.cards import named_lines
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import report_in
from raysgd.storage import Folder, open_folder

_RUN = re.compile(r"run_\d{3,}")
_CHECKPOINT = "checkpoint_"
_TAIL_OF_ERROR = 12
_MOST_METRICS = 4
_MOST_FOLDERS = 3
_SILENT_S = 600.0
_NOT_OF_USER = FILLED_IN | {"epoch", "experiment_id", "timesteps_total"}
"""Keys that raysgd or Ray adds to reports. They are not metrics of the user."""

EXPECTED = (
    "Expected one of: the folder of a run of `fit()` (with `result.json`) or the one above it (with `run.json`); the "
    "`logdir` of a `raysgd.train.Trainer` (with `run_001`); the `folder` of `TorchTrainer.fit` or `TFTrainer.fit` "
    "(with `metrics.jsonl`, or checkpoints with their `.run.json`)"
)


def without_folder() -> str:
    """Return the message for a user who passed no folder, with a list of the newest runs in the default folder."""
    results = RESULTS_FOLDER.expanduser()
    folders = [each for each in results.iterdir() if each.is_dir()] if results.is_dir() else []
    newest = sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True)[:_MOST_FOLDERS]
    lines = [f"  raysgd status {printable(str(each))}" for each in newest]
    where = f"The newest in {RESULTS_FOLDER}:" if newest else f"There is none in {RESULTS_FOLDER}."
    return "\n".join([f"Pass the folder of a run. {where}", *lines])


def read_status(path: str, now: float | None = None) -> str:
    """Return a description of the status of the run in a folder.

    Args:
        path: Path or URI of the folder.
        now: Current time in seconds since 1970. Default: the system time.

    Raises:
        StorageError: The folder cannot be read.
        ValueError: The path is invalid, does not exist, or is not the folder of a run.
        ModuleNotFoundError: Reading from this URI needs a package that is not installed.
    """
    folder = open_folder(path, argument="RUN_FOLDER")
    if not folder.exists():
        is_file = folder.is_local and folder.local_path.exists()
        raise ValueError(f"`{masked(path)}` {'is a file, not a folder' if is_file else 'does not exist'}. {EXPECTED}.")
    status = _status_of(folder, time.time() if now is None else now)
    if status is None:
        names = folder.names()
        content = f"has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "is empty"
        raise ValueError(f"`{masked(path)}` is not the folder of a run: it {printable(content)}. {EXPECTED}.")
    return status


def _status_of(folder: Folder, now: float) -> str | None:
    names = set(folder.names())
    if "run.json" in names:
        return _experiment(folder, names, now)
    if "result.json" in names:
        return _trial(folder, {}, now)
    if runs := sorted((name for name in names if _RUN.fullmatch(name)), key=lambda name: (len(name), name)):
        return _function_run(folder / runs[-1], len(runs), now)
    if "results.json" in names or (_RUN.fullmatch(folder.name) and "checkpoints" in names):
        return _function_run(folder, 1, now)
    return _class_run(folder, names, now)


def _shown(folder: Folder, kind: str, state: str, facts: Sequence[tuple[str, str]] = (), error: str = "") -> str:
    """Format the status of a run as lines of text.

    Args:
        folder: The folder of the run.
        kind: The kind of run, such as "trainer.fit()".
        state: State of the run. It starts with "finished", "stopped", "interrupted", "failed" or "running", with
            "silent" if nothing was written for a while, or with "unknown".
        facts: Further lines, as pairs of a name and a value.
        error: Text of the error that ended the run, if any. Only its last lines are shown.
    """
    rows = [("run", str(folder)), ("kind", kind), ("state", state), *facts]
    lines = named_lines([(name, printable(value)) for name, value in rows], indent=13)
    return "\n".join([*lines, *(f"  {printable(line)}" for line in error.rstrip().splitlines()[-_TAIL_OF_ERROR:])])


# ------------------------------------------------------------------------------------------------- kinds of folders


def _experiment(folder: Folder, names: set[str], now: float) -> str:
    """Return the status of a `fit()` run from its experiment's folder. Its `run.json` names the trial's folder."""
    note = report_in(_text(folder, "run.json")) or {}
    trial = note.get("trial")
    if isinstance(trial, str) and trial in names:
        return _trial(folder / trial, note, now)
    return _shown(folder, "fit()", "unknown: `run.json` is damaged, or names a missing folder")


def _trial(folder: Folder, note: Mapping[str, Any], now: float) -> str:
    reports, error = read_reports(folder), _text(folder, "error.txt")
    last = reports[-1] if reports else {}
    checkpoints = sorted(name for name in folder.committed() if name.startswith(_CHECKPOINT))
    state = _state_of_trial(note.get("status"), last, bool(error), now)
    facts = [("reports", _counted(reports, now)), *_metrics(last), ("checkpoints", _listed(checkpoints))]
    trainer = note.get("trainer")
    return _shown(folder, f"fit() of {trainer}" if isinstance(trainer, str) else "fit()", state, facts, error)


def _state_of_trial(status: Any, last: Mapping[str, Any], has_error: bool, now: float) -> str:
    if status == "ERROR" or (status is None and has_error):
        return "failed"
    if status == "TERMINATED" or (status is None and last.get("done") is True):
        return "finished"
    return _running("last report", _written_at(last), now) + (", after a failure" if has_error else "")


def _function_run(folder: Folder, num_runs: int, now: float) -> str:
    """Return the status of a `Trainer.run` call.

    The files in the call's folder do not show whether the call has ended.
    """
    content: Any = None
    with suppress(ValueError, RecursionError):
        content = json.loads(_text(folder, "results.json"))
    entries = content if isinstance(content, list) else []
    reports = [entry[0] for entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], dict)]
    last = reports[-1] if reports else {}
    checkpoints = sorted(name for name in (folder / "checkpoints").names() if name.startswith(_CHECKPOINT))
    count = _counted(reports, now) if folder.has("results.json") else "not written: add a `JsonLoggerCallback`"
    facts = [("reports", count), *_metrics(last), ("checkpoints", _listed(checkpoints)), ("runs", str(num_runs))]
    return _shown(folder, "Trainer.run()", _running("last report", _written_at(last), now), facts)


def _class_run(folder: Folder, names: set[str], now: float) -> str | None:
    """Return the status of a call to `fit` of a `TorchTrainer` or `TFTrainer`.

    Return None if the folder has no files of such a run. The status is read from files that callbacks have written, and
    from the newest checkpoint's sidecar file: a JSON file beside the checkpoint with the history of the run.
    """
    sidecars, index = dict[str, str](), None
    for place in (folder, folder / "checkpoints"):
        beside = [name.removesuffix(ENDING) for name in place.names() if name.endswith(ENDING)]
        sidecars.update({name: (place / name).uri for name in beside})
        index = index or report_in(_text(place, INDEX_FILE))
    if not sidecars and index is None and "metrics.jsonl" not in names:
        return None
    checkpoints = sorted(sidecars, key=lambda name: (_place(sidecars[name]), name))
    newest = _newest([sidecars[name] for name in checkpoints])
    history = History() if newest is None else newest.history
    written = map(report_in, _text(folder, "metrics.jsonl").split("\n"))
    rows = [row for row in written if row is not None] or [*history]
    last: Mapping[str, Any] = rows[-1] if rows else {}
    facts = [
        ("epochs", str(int(_number(last.get("epoch"))) or len(rows))),
        *_metrics(last),
        ("checkpoints", _listed(checkpoints)),
        *[("event", f"{event.kind}: {event.cause}") for event in history.events],
    ]
    end = None if index is None else index.get(END)
    if isinstance(end, str):
        state = end
    elif index is None and history.stop_reason is not None:
        state = f"stopped: {history.stop_reason}"
    elif newest is not None and newest.epochs is not None and newest.epoch >= newest.epochs:
        state = "finished"
    else:
        ended = _number(history.records[-1].began_at) + _number(history.records[-1].seconds) if history.records else 0.0
        state = _running("newest checkpoint", ended, now)
    return _shown(folder, "trainer.fit()", state, facts)


def _place(checkpoint: str) -> tuple[int, int]:
    """Return the result of `place_of`. A checkpoint whose sidecar file is damaged counts as the oldest."""
    with suppress(ValueError):
        return place_of(checkpoint)
    return -1, 0


def _newest(checkpoints: Sequence[str]) -> Sidecar | None:
    """Return the content of the last sidecar file that can be read. Return None if no sidecar file can be read."""
    for checkpoint in reversed(checkpoints):
        with suppress(ValueError):
            return Sidecars().read(checkpoint)
    return None


# ------------------------------------------------------------------------------------------------- files and words


def _text(folder: Folder, name: str) -> str:
    """Return the text of a file, or an empty string if the file does not exist."""
    try:
        return folder.read(name).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _number(value: Any) -> float:
    """Return a value from a file if it is a number of plausible size for a count or a time. Otherwise, return 0."""
    return value if isinstance(value, int | float) and abs(value) < 1e15 else 0


def _metrics(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a list with one status line, which shows the most informative metrics of a report.

    The line is a pair of a name and a text. The list is empty if the report has no metrics.
    """
    names = [
        name
        for name, value in report.items()
        if readable.is_metric(name, value) and name not in _NOT_OF_USER and not name.startswith("_")
    ]
    shown = [f"{name}={_in_short(report[name])}" for name in readable.most_telling(names, _MOST_METRICS)]
    return [("metrics", ", ".join(shown))] if shown else []


def _in_short(value: float) -> str:
    return "too large" if isinstance(value, int) and abs(value) > 1e300 else f"{value:.4g}"


def _counted(reports: Sequence[Mapping[str, Any]], now: float) -> str:
    if not reports:
        return "none yet"
    at = _written_at(reports[-1])
    age = f"the last report is {_ago(at, now)}" if at > 0 else "no report says when it was written"
    return f"{len(reports)}, {age}"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}, the newest is {names[-1]}" if names else "none"


def _written_at(report: Mapping[str, Any]) -> float:
    return _number(report.get("timestamp", report.get("_timestamp")))


def _running(sign: str, at: float, now: float) -> str:
    """Return, as text, the state of a run whose files do not show that it has ended.

    Such a run is still running, or its program was killed.

    Args:
        sign: What the run has written last, such as "last report".
        at: Time at which the run wrote this, in seconds since 1970. 0 if it has written nothing.
        now: The current time, in seconds since 1970.
    """
    if at <= 0:
        return f"running, or its driver is gone: there is no {sign}"
    word = "running" if now - at < _SILENT_S else "silent (in a long epoch, or its driver is gone)"
    return f"{word}: the {sign} is {_ago(at, now)}"


def _ago(at: float, now: float) -> str:
    """Return the time since something happened, as text, in the largest unit that gives a number of at least 2.

    >>> _ago(0, 7500)
    '2 h old'
    """
    seconds = max(0.0, now - at)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} old"
    return f"{seconds:.0f} s old"
