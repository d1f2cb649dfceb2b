"""The status of a run, read from the files in its folder, without running or trusting anything in them.

Three kinds of folders are known: that of `fit()` in the style of Ray AIR (or the folder above it, of the experiment),
the `logdir` of a `raysgd.train.Trainer`, and the folder of `TorchTrainer.fit` and `TFTrainer.fit`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._text.cards import named_lines
from raysgd.air.reports import FILLED_IN
from raysgd.history import readable
from raysgd.storage import Folder, open_folder

_RUN = re.compile(r"run_\d{3,}")
_SIDECAR = ".run.json"
_PART = re.compile(r"history-[0-9a-f]{16}\.json")  # see `raysgd/callbacks/sidecar.py`
_CHECKPOINT = "checkpoint_"
_TAIL_OF_ERROR = 12
_LONGEST = 300
_MOST_METRICS = 4
_SILENT_S = 600.0
_NOT_OF_USER = FILLED_IN | {"epoch", "experiment_id", "timesteps_total"}
"""Values of a report that this library filled in, or Ray; they are no metrics of the user."""

EXPECTED = (
    "Expected one of: the folder of a run of `fit()` (with `result.json`) or the one above it (with `run.json`); the "
    "`logdir` of a `raysgd.train.Trainer` (with `run_001`); the `folder` of `TorchTrainer.fit` or `TFTrainer.fit` "
    "(with `metrics.jsonl`, or checkpoints with their `.run.json`)"
)


class NotARunError(ValueError):
    """The folder is not that of a run."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes:
        folder: Where its files are.
        kind: What wrote them.
        state: How it is, in a word ("finished", "stopped", "failed", "running", or "silent" if nothing was written for
            a while), and why, or since when.
        facts: Names and values to show.
        error: The end of what it failed with.
    """

    folder: str
    kind: str
    state: str
    facts: tuple[tuple[str, str], ...] = ()
    error: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        rows = [("run", self.folder), ("kind", self.kind), ("state", self.state), *self.facts]
        lines = named_lines([(name, printable(value)) for name, value in rows], indent=13)
        return "\n".join([*lines, *(f"  {printable(line)}" for line in self.error)])


def read_status(path: str, now: Callable[[], float] = time.time) -> RunStatus:
    """Reads the folder of a run.

    Args:
        path: A path or a URI.
        now: The time, in seconds since 1970.

    Raises:
        NotARunError: No run has written it.
        StorageError: It cannot be read.
        ValueError, ModuleNotFoundError: The path cannot be one, or its store needs a package.
    """
    folder = open_folder(path, argument="RUN_FOLDER")
    if not folder.exists():
        is_file = folder.is_local and folder.local_path.exists()
        raise NotARunError(f"`{path}` {'is a file, not a folder' if is_file else 'does not exist'}. {EXPECTED}.")
    found = _found(folder, now)
    if found is None:
        names = folder.names()
        content = f"has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "is empty"
        raise NotARunError(f"`{path}` is not the folder of a run: it {printable(content)}. {EXPECTED}.")
    return found


def _found(folder: Folder, now: Callable[[], float]) -> RunStatus | None:
    names = set(folder.names())
    if "run.json" in names:
        return _experiment(folder, names, now)
    if "result.json" in names:
        return _trial(folder, None, now)
    if runs := sorted((name for name in names if _RUN.fullmatch(name)), key=lambda name: (len(name), name)):
        return _function_run(folder / runs[-1], len(runs), now)
    if "results.json" in names or (_RUN.fullmatch(folder.name) and "checkpoints" in names):
        return _function_run(folder, 1, now)
    return _class_run(folder, names, now)


# ------------------------------------------------------------------------------------------------- kinds of folders


def _experiment(folder: Folder, names: set[str], now: Callable[[], float]) -> RunStatus:
    """The folder above that of the trial: `run.json` says which one is the last."""
    note = _json(folder, "run.json")
    trial = note.get("trial") if isinstance(note, dict) else None
    if isinstance(note, dict) and isinstance(trial, str) and trial in names:
        return _trial(folder / trial, note, now)
    return RunStatus(str(folder), "fit()", "unknown: `run.json` is damaged, or names a folder that is not there")


def _trial(folder: Folder, note: Mapping[str, Any] | None, now: Callable[[], float]) -> RunStatus:
    reports = _json_lines(folder, "result.json")
    last = reports[-1] if reports else {}
    error = _tail(folder, "error.txt")
    checkpoints = sorted(name for name in folder.committed() if name.startswith(_CHECKPOINT))
    state = _state_of_trial((note or {}).get("status"), last, bool(error), now)
    facts = [("reports", _counted(reports, now)), *_metrics(last), ("checkpoints", _listed(checkpoints))]
    trainer = (note or {}).get("trainer")
    return RunStatus(
        str(folder), f"fit() of {trainer}" if isinstance(trainer, str) else "fit()", state, tuple(facts), error
    )


def _state_of_trial(status: Any, last: Mapping[str, Any], has_error: bool, now: Callable[[], float]) -> str:
    if status == "ERROR" or (status is None and has_error):
        return "failed"
    if status == "TERMINATED" or (status is None and last.get("done") is True):
        return "finished"
    return _running("last report", last.get("timestamp"), now) + (", after a failure" if has_error else "")


def _function_run(folder: Folder, num_runs: int, now: Callable[[], float]) -> RunStatus:
    """One run of a `Trainer`: it notes no end, so only the time of its last report says something."""
    content = _json(folder, "results.json")
    reports = [entry[0] for entry in content if _is_report_list(entry)] if isinstance(content, list) else []
    last = reports[-1] if reports else {}
    checkpoints = sorted(name for name in (folder / "checkpoints").names() if name.startswith(_CHECKPOINT))
    told = _counted(reports, now) if folder.has("results.json") else "not written: add a `JsonLoggerCallback`"
    facts = [("reports", told), *_metrics(last), ("checkpoints", _listed(checkpoints)), ("runs", str(num_runs))]
    return RunStatus(str(folder), "Trainer.run()", _running("last report", last.get("_timestamp"), now), tuple(facts))


def _is_report_list(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and isinstance(entry[0], dict)


def _class_run(folder: Folder, names: set[str], now: Callable[[], float]) -> RunStatus | None:
    """The folder of `trainer.fit`: what callbacks wrote there, and what stands beside the newest checkpoint."""
    places = {place: place.names() for place in (folder, folder / "checkpoints")}
    sidecars = [(place, name) for place, inside in places.items() for name in inside if name.endswith(_SIDECAR)]
    if not sidecars and "metrics.jsonl" not in names:
        return None
    place, newest = _newest(sidecars) or (folder, {})
    history = _dict(newest.get("history"))
    rows = _json_lines(folder, "metrics.jsonl") or [row for row in _list(history, "rows") if isinstance(row, dict)]
    parts = [
        _dict(_json(place, name)) for name in _list(newest, "parts") if isinstance(name, str) and _PART.fullmatch(name)
    ]
    events = [event for part in (*parts, history) for event in _list(part, "events") if isinstance(event, dict)]
    last, stopped = rows[-1] if rows else {}, history.get("stop_reason")
    facts = [
        ("epochs", str(int(_number(last.get("epoch"))) or len(rows))),
        *_metrics(last),
        ("checkpoints", _listed(sorted(name.removesuffix(_SIDECAR) for _, name in sidecars))),
        *[("event", f"{event.get('kind')}: {event.get('cause')}") for event in events],
    ]
    is_over = 0 < _number(newest.get("epochs")) <= _number(newest.get("epoch"))
    state = f"stopped: {stopped}" if isinstance(stopped, str) else "finished" if is_over else _since(history, now)
    return RunStatus(str(folder), "trainer.fit()", state, tuple(facts))


def _newest(sidecars: Iterable[tuple[Folder, str]]) -> tuple[Folder, dict[str, Any]] | None:
    """The content of the one with the most epochs, and where it is; None where none can be read."""
    found = ((place, content) for place, name in sidecars if isinstance(content := _json(place, name), dict))
    return max(found, key=lambda each: _number(each[1].get("epoch")), default=None)


def _since(history: Mapping[str, Any], now: Callable[[], float]) -> str:
    """Return the state of a run that has noted no end, from the last call before the newest checkpoint."""
    records = [record for record in _list(history, "records") if isinstance(record, dict)]
    last = records[-1] if records else {}
    return _running("newest checkpoint", _number(last.get("began_at")) + _number(last.get("seconds")), now)


# ------------------------------------------------------------------------------------------------- files and words


def _text(folder: Folder, name: str) -> str:
    """Return what is in a file; nothing where there is none."""
    try:
        return folder.read(name).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _json(folder: Folder, name: str) -> Any:
    """Return what a file of JSON says; None where it is not whole."""
    try:
        return json.loads(_text(folder, name))
    except (ValueError, RecursionError):
        return None


def _json_lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    """The objects in a file, one a line, without the lines that are not whole."""
    found = []
    for line in _text(folder, name).split("\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _tail(folder: Folder, name: str) -> tuple[str, ...]:
    return tuple(_text(folder, name).rstrip().splitlines()[-_TAIL_OF_ERROR:])


def _list(content: Mapping[str, Any], name: str) -> list[Any]:
    found = content.get(name)
    return found if isinstance(found, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """A number of a file; 0 for anything else, and for numbers that no count or time can be."""
    return value if isinstance(value, int | float) and abs(value) < 1e15 else 0


def _metrics(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of the last report that say most, in one row."""
    names = [
        name
        for name, value in report.items()
        if readable.is_metric(name, value) and name not in _NOT_OF_USER and not name.startswith("_")
    ]
    shown = [f"{name}={_shown(report[name])}" for name in readable.most_telling(names, _MOST_METRICS)]
    return [("metrics", ", ".join(shown))] if shown else []


def _shown(value: float) -> str:
    return "too large" if isinstance(value, int) and abs(value) > 1e300 else f"{value:.4g}"


def _counted(reports: Sequence[Mapping[str, Any]], now: Callable[[], float]) -> str:
    if not reports:
        return "none yet"
    at = reports[-1].get("timestamp", reports[-1].get("_timestamp"))
    return f"{len(reports)}, {_last_sign(at, now)}"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}, the newest is {names[-1]}" if names else "none"


def _running(sign: str, at: Any, now: Callable[[], float]) -> str:
    """Return the state of a run that has noted no end: no one can tell a long epoch from a driver that is gone."""
    if _number(at) <= 0:
        return f"running, or its driver is gone: there is no {sign}"
    word = "running" if now() - _number(at) < _SILENT_S else "silent, a long epoch or its driver is gone"
    return f"{word}: the {sign} is {_ago(_number(at), now)}"


def _last_sign(at: Any, now: Callable[[], float]) -> str:
    return f"the last report is {_ago(_number(at), now)}" if _number(at) > 0 else "no report says when it was written"


def _ago(at: float, now: Callable[[], float]) -> str:
    """Return how long ago something was, in the largest unit.

    >>> _ago(0, lambda: 7500)
    '2 h old'
    """
    seconds = max(0.0, now() - at)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} old"
    return f"{seconds:.0f} s old"


def printable(text: str) -> str:
    r"""A text that cannot move the cursor or change the colors of a terminal, and that is not endless.

    >>> print(printable("loss\x1b[31m"))
    loss\x1b[31m
    """
    safe = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:_LONGEST])
    return safe if len(text) <= _LONGEST else f"{safe}..."
