"""`HTMLReport`: a callback that shows a run in one self-contained HTML file, which it updates during the run.

This module writes the text and the tables of the page. In the browser, uPlot and `page/page.js` draw the charts.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import reprlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from raysgd._version import __version__
from raysgd.callbacks.callback import Run, WritesFiles, given_path
from raysgd.core.arguments import is_number
from raysgd.core.files import replacing
from raysgd.core.history import readable
from raysgd.core.history.history import History, evenly, plain
from raysgd.core.numbers import timing
from raysgd.core.text import cards
from raysgd.core.text.cards import safe
from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import failures_warned

if TYPE_CHECKING:
    from raysgd.core.engine.shared.interface import GroupEvent


_PACKAGES = ("ray", "torch", "tensorflow", "keras", "lightning", "transformers", "numpy")
_OPTIONS = ("backend", "use_gpu", "precision", "strategy", "min_workers", "spare_workers")
_SHARE = 50  # writing the report may take at most 1/50 of the time of the run
_MOST_ENTRIES = 500
_REFRESH_S = 10
_MOST_ROWS = 200
_MOST_POINTS = 2000  # maximum number of points per curve in the data of the page
_LARGEST = 1e100  # metrics with larger absolute values are not drawn


class HTMLReport(WritesFiles):
    """Writes an HTML report of the run: curves, throughput, how time was spent, failures, results, and the config.

    The file is complete whenever you open it, and needs no network. While the run is active, the page refreshes itself.
    In a run with many short epochs, the file is not written after every epoch, but always after the last. Keys and
    passwords in the config are shown as `***`; they are recognized by the names of their entries, and inside URIs.

    Args:
        path: Path of the file. Default: `report.html` in the run's folder.

    Raises:
        TypeError, ValueError: `path` is not a path, or is a URI.

    Examples:
        >>> trainer.fit(10, callbacks=[HTMLReport()])  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = given_path("path", path)
        self._warned = Once()
        self._rest_until = 0.0
        self._steps: list[dict[str, Any]] = []

    def on_run_begin(self, run: Run) -> None:
        self._steps = []
        self._write(run, "running")

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self._steps.append({"step": step, **metrics})
        if time.monotonic() >= self._rest_until:
            self._write(run, "running")

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        self.on_step_metrics(run, step, readable.chosen(metrics, None))

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self._write(run, "running")

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        if time.monotonic() >= self._rest_until:
            self._write(run, "running")

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        if error is not None:
            self._write(run, "failed", masked(f"{type(error).__name__}: {error}".removesuffix(": ")))
        elif run.history.stop_reason is not None:
            self._write(run, "stopped", run.history.stop_reason)
        else:
            self._write(run, "finished")

    def left_behind(self, run: Run) -> str | None:
        path = self.path(run)
        return f"report: {path}" if path.is_file() else None

    def path(self, run: Run) -> Path:
        """Return the path of the report of this run."""
        return self._given if self._given is not None else run.folder / "report.html"

    def _write(self, run: Run, state: str, reason: str = "") -> None:
        with failures_warned(type(self).__name__, self._warned):
            began, path = time.monotonic(), self.path(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            page = page_of(facts_of(run, state, reason), run.history, self._steps)
            with replacing(str(path)) as file:
                file.write(page.encode("utf-8", errors="replace"))
            self._rest_until = began + _SHARE * (time.monotonic() - began)


def facts_of(run: Run, state: str, reason: str = "") -> dict[str, Any]:
    """Return everything that the page shows about a run, except its history and step metrics, as plain data.

    Args:
        run: The run.
        state: State of the run, such as "running" or "failed".
        reason: Why the run has failed or was stopped.
    """
    trainer = run.trainer
    about: dict[str, Any] = {"raysgd": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:  # packages that the program has not imported get None, and are left out below
        about[name] = getattr(sys.modules.get(name), "__version__", None)
    about |= {"system": platform.platform(), "host": platform.node()}
    if trainer is not None:
        about |= {"trainer": type(trainer).__name__, "num_workers": getattr(trainer, "max_replicas", None)}
        about |= {name: getattr(trainer, name, None) for name in _OPTIONS}
    texts = reprlib.Repr()
    texts.maxstring = texts.maxother = texts.maxlong = 300
    texts.maxdict = texts.maxlist = texts.maxtuple = 50
    config = itertools.islice(masked(run.config).items(), _MOST_ENTRIES)
    return {
        "name": str(run.name),
        "state": state,
        "reason": reason,
        "epoch": run.epoch,
        "epochs": run.epochs,
        "started_at": run.started_at,
        "written_at": time.time(),
        "config": {str(name): texts.repr(value) for name, value in config},
        "about": {name: str(value) for name, value in about.items() if value is not None},
        "ledger": {} if trainer is None else trainer.ledger().total(),
    }


def page_of(facts: Mapping[str, Any], history: History, steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page of a report. While the run is active, the page refreshes itself.

    The content security policy of the page allows only the scripts of this library.

    Args:
        facts: Everything to show about the run, as `facts_of` returns it.
        history: History of the run.
        steps: The metrics of steps.
    """
    files = Path(__file__).with_name("page")
    names = ("page.html", "uplot/uPlot.min.css", "page.css", "uplot/LICENSE", "uplot/uPlot.iife.min.js", "page.js")
    page, uplot_style, style, license_text, uplot, script = ((files / name).read_text("utf-8") for name in names)
    charts = grouped([*history, *steps]) if max(len(history), len(steps)) > 1 else {}
    content = {
        "run": facts,
        "history": history.thinned(_MOST_POINTS).as_data(),
        "steps": plain(evenly(steps, _MOST_POINTS)),
        "charts": [*charts.values()],
    }
    data = json.dumps(content, allow_nan=False)
    figures = "".join(f'<figure class="card"><figcaption>{safe(title)}</figcaption></figure>' for title in charts)
    return Template(page).substitute(
        nonce=secrets.token_urlsafe(16),
        refresh=f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if facts["state"] == "running" else "",
        title=safe(f"{facts['name']}: {facts['state']}"),
        style=uplot_style + style,
        header=_header(facts, history),
        hidden="" if charts else " hidden",
        figures=figures or _note("Curves begin with the second result."),
        events=_events(history),
        ledger=_where_time_went(facts["ledger"]),
        results=_results(history),
        config=cards.two_column_table(facts["config"].items(), "facts"),
        about=cards.two_column_table(facts["about"].items(), "facts"),
        moment=_moment(facts["written_at"]),
        data=data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        license=license_text,
        uplot=uplot,
        script=script,
    )


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the metrics to draw in each chart of the page, by the title of the chart.

    A training metric and its validation metric share a chart. The learning rate comes last. Metrics without values that
    can be drawn are left out. If two metrics of a chart have the same values, only one of them is drawn.
    """
    groups: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(readable.metrics_of(rows), key=lambda name: name == "lr"):
        base = name.removeprefix("train_").removeprefix("val_")
        values: list[Any] = [row.get(name) for row in rows]
        can_be_drawn = any(is_number(value) and abs(float(value)) <= _LARGEST for value in values)
        if can_be_drawn and values not in groups.get(base, {}).values():
            groups.setdefault(base, {})[name] = values
    return {base: [*lines] for base, lines in groups.items()}


def _header(facts: Mapping[str, Any], history: History) -> str:
    of = f" of {facts['epochs']}" if facts["epochs"] is not None else ""
    took = readable.seconds(max(0.0, facts["written_at"] - facts["started_at"]))
    moment = _moment(facts["started_at"])
    before = [record.epoch for record in history.records if record.began_at < facts["started_at"]]
    resumed = [f"continued after epoch {max(before)} at {moment}", f"{took} since then"] if before else []
    parts = [f"epoch {facts['epoch']}{of}", *(resumed or [took, f"started {moment}"])]
    if sizes := sorted({record.num_workers for record in history.records}):
        parts.append(readable.counted(sizes[-1], "worker") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} workers")
    parts += readable.failures(history.events)
    state, reason = safe(facts["state"]), f'<p class="reason">{safe(facts["reason"])}</p>' if facts["reason"] else ""
    name = safe(facts["name"])
    return (
        f'<header><h1>{name}</h1><span class="state {state}">{state}</span><p>{", ".join(parts)}</p>{reason}</header>'
    )


def _events(history: History) -> str:
    """Return a numbered HTML list of the events in which workers were lost, added or replaced.

    In the chart above the list, each event is marked with the same number.
    """
    items = "".join(f"<li>{safe(line)}</li>" for line in readable.event_lines(history.events))
    return f"<ol>{items}</ol>" if items else _note("No worker was lost, and none was added.")


def _where_time_went(ledger: Mapping[str, float]) -> str:
    """Return an HTML table of how the workers spent their time in training calls.

    A note below the table has the goodput, and the time outside of training calls.
    """
    inside = {name: took for name, took in ledger.items() if name not in timing.OUTSIDE and took > 0}
    total, goodput = sum(inside.values()), timing.goodput_of(ledger)
    if goodput is None:
        return _note("There is no account of it.")
    shown = [name for name in timing.BINS if inside.get(name, 0.0) >= timing.SHOWN_FROM * total]
    parts = [(timing.BINS[name], inside.pop(name)) for name in shown]
    if inside:
        parts.append((f"the rest, each part below {timing.SHOWN_FROM:.1%}", sum(inside.values())))
    rows = "".join(
        f'<tr><td>{safe(words)}</td><td>{readable.seconds(took)}</td><td>{took / total:.1%}</td><td class="bar">'
        f'<i style="width:{took / total:.2%}"></i></td></tr>'
        for words, took in parts
    )
    outside = {timing.BINS[name]: ledger[name] for name in timing.OUTSIDE if name in ledger}
    times = ", ".join(f"{words} {readable.seconds(took)}" for words, took in outside.items())
    note = f"Time of all workers together. Goodput {goodput:.1%}: the share of it that was not lost to failures."
    note += f" Outside of training calls: {times}." if times else ""
    return f'<div class="card table"><table class="keys">{rows}</table></div>{_note(note)}'


def _results(history: History) -> str:
    """Return an HTML table with the metrics of the last epochs, and a folded table with their other results."""
    rows = [*history][-_MOST_ROWS:]
    metrics = readable.metrics_of(rows)
    others = ["epoch", *(name for name in readable.names_in(rows) if name not in {*metrics, "epoch"})]
    cells = [[readable.number(row.get(name, ""))[:80] for name in others] for row in rows]
    rest = f"<details><summary>Counts and other values</summary>{_table(others, cells)}</details>"
    limit = f"The last {_MOST_ROWS} of {len(history)} rows. The source of this page has {_MOST_POINTS} of them at most."
    note = _note(limit) if len(history) > len(rows) else ""
    return _table(*readable.table_of(rows, metrics, _MOST_ROWS)) + note + rest


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<div class="card table">{cards.grid(head, rows, "numbers")}</div>'


def _note(text: str) -> str:
    return f'<p class="note">{safe(text)}</p>'


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
