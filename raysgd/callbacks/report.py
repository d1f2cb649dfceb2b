"""`HTMLReport`: a run as one HTML file that needs nothing else, written again after every epoch.

Python writes the words and tables of the page; the charts are drawn in the browser, by uPlot and `page/page.js`.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import platform
import reprlib
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd._files import check_path, replacing
from raysgd._text import cards
from raysgd._text.cards import safe
from raysgd._text.log_lines import Once
from raysgd._text.secrets import masked
from raysgd._version import __version__
from raysgd.callbacks.callback import Callback, Run
from raysgd.engine.shared import time_spent
from raysgd.history import readable
from raysgd.history.charts import NUM_COLORS, color_of, grouped, shown_events, table_of, told_at
from raysgd.history.history import History
from raysgd.writers.sink import failures_warned

if TYPE_CHECKING:
    from raysgd.engine.shared.group_events import GroupEvent


DATA_ID = "raysgd-run"
_PACKAGES = ("ray", "torch", "tensorflow", "keras", "lightning", "transformers", "numpy")
_OPTIONS = ("backend", "use_gpu", "precision", "strategy", "min_workers", "spare_workers")
_LONG_S, _SHARE = 0.05, 50  # a report that takes longer to write than this may take a fiftieth of the time
_MOST_ENTRIES = 500
_REFRESH_S = 10
_MOST_ROWS = 200
_MOST_POINTS = 2000  # of each curve, in the data of the page
_BAD = (time_spent.AGAIN, *time_spent.RECOVERY)


class HTMLReport(Callback):
    """Writes a report of the run: curves, throughput, where the time went, failures, results, configuration.

    The file is complete whenever you open it, and needs no network. While the run goes on, the page refreshes itself.
    If writing takes long, because the run has very many short epochs, some are skipped; the last one never is.
    Keys and passwords in the config are `***`: entries with such names, and those in URIs.

    Args:
        path: The file; None means `report.html` in the folder of the run.

    Raises:
        TypeError, ValueError: `path` is no path, or a URI.

    Examples:
        >>> trainer.fit(10, callbacks=[HTMLReport()])  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            check_path("path", path)
        self._given = Path(path).expanduser().absolute() if path is not None else None
        self._warned = Once()
        self._rest_until = 0.0

    def on_run_begin(self, run: Run) -> None:
        self._write(run, "running")

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
        """Return where the report of a run is."""
        return self._given if self._given is not None else run.folder / "report.html"

    def _write(self, run: Run, state: str, reason: str = "") -> None:
        with failures_warned(type(self).__name__, self._warned):
            began, path = time.monotonic(), self.path(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            page = page_of(facts_of(run, state, reason), run.history)
            with replacing(str(path)) as file:
                file.write(page.encode("utf-8", errors="replace"))
            took = time.monotonic() - began
            self._rest_until = began + took * _SHARE if took > _LONG_S else 0.0


def facts_of(run: Run, state: str, reason: str = "") -> dict[str, Any]:
    """Return what there is to tell of a run besides its history, as plain data for the page.

    Args:
        run: The run.
        state: "running", "finished", "stopped" or "failed".
        reason: Why it was stopped or failed.
    """
    trainer = run.trainer
    options = {"trainer": type(trainer).__name__, "num_workers": getattr(trainer, "max_replicas", None)}
    options |= {name: getattr(trainer, name, None) for name in _OPTIONS}
    loaded = {name: sys.modules[name] for name in _PACKAGES if name in sys.modules}  # nothing is imported for this
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()}
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
        "trainer": {name: str(value) for name, value in options.items() if value is not None} if trainer else {},
        "config": {str(name): texts.repr(value) for name, value in config},
        "versions": {"raysgd": __version__, "Python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(), "host": platform.node()},
        "ledger": {} if trainer is None else trainer.ledger().total(),
    }


def page_of(facts: Mapping[str, Any], history: History) -> str:
    """Return the page. It refreshes itself as long as the run goes on, and a browser runs no script but ours in it."""
    files = Path(__file__).with_name("page")
    style, scripts, policy = _parts(files)
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if facts["state"] == "running" else ""
    folded = {name.capitalize(): facts[name] for name in ("trainer", "config", "versions", "machine")}
    sections = [
        _header(facts),
        _tiles(history),
        _section("Metrics", _curves(history)),
        _section("Over time", f'<div class="card"><div class="chart" id="times"></div></div>{_events(history)}'),
        _section("Where the time went", _where_time_went(facts["ledger"])),
        _section("Results", _results(history)),
        *(_folded(title, cards.two_column_table(rows.items(), "facts")) for title, rows in folded.items() if rows),
    ]
    content = json.dumps({"run": facts, "history": history.thinned(_MOST_POINTS).as_data()}, allow_nan=False)
    data = content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{refresh}
<title>{safe(facts["name"])}: {safe(facts["state"])}</title>
<style>{style}</style>
</head>
<body>
<main>
{"".join(sections)}
<footer>Written by raysgd at {_moment(facts["written_at"])}. The data of this page is in its source, as JSON.</footer>
</main>
<script type="application/json" id="{DATA_ID}">{data}</script>
{scripts}
</body>
</html>
"""


@cache
def _parts(files: Path) -> tuple[str, str, str]:
    """Return the style of the page, its scripts (the library with its license, and ours), and what it may run."""
    names = ("uplot/uPlot.min.css", "page.css", "uplot/LICENSE", "uplot/uPlot.iife.min.js", "page.js")
    style_of_charts, style, license_text, charts, script = ((files / name).read_text("utf-8") for name in names)
    scripts = (f"/*\n{license_text}*/\n{charts}", script)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    return style_of_charts + style, "".join(f"<script>{each}</script>" for each in scripts), policy


def _header(facts: Mapping[str, Any]) -> str:
    of = f" of {facts['epochs']}" if facts["epochs"] is not None else ""
    took = readable.seconds(max(0.0, facts["written_at"] - facts["started_at"]))
    reason = f'<p class="reason">{safe(facts["reason"])}</p>' if facts["reason"] else ""
    state = safe(facts["state"])
    return (
        f'<header><h1>{safe(facts["name"])}</h1><span class="state {state}">{state}</span>'
        f"<p>epoch {facts['epoch']}{of}, {took}, started {_moment(facts['started_at'])}</p>{reason}</header>"
    )


def _tiles(history: History) -> str:
    """Return the numbers that say most: the name, the value of now, and what it was before."""
    tiles = []
    for name in readable.most_telling(readable.metrics_of(history), 3):
        values = [readable.number(row[name]) for row in history if readable.is_real(row.get(name))]
        tiles.append((name, values[-1], f"from {values[0]}") if values else (name, "none", "no finite value"))
    calls = [{**record.metrics, "seconds": record.seconds} for record in history.records if record.kind == "train"]
    speeds = [speed for call in calls if (speed := readable.samples_per_s(call)) is not None]
    if speeds:
        last, best = (readable.rate(speed).removesuffix(" samples/s") for speed in (speeds[-1], max(speeds)))
        tiles.append(("samples/s", last, f"at best {best}"))
    if sizes := [record.num_workers for record in history.records]:
        is_constant = min(sizes) == max(sizes)
        tiles.append(("workers", str(sizes[-1]), "all the time" if is_constant else f"{min(sizes)} to {max(sizes)}"))
    if lost := [event.seconds for event in history.events if event.is_failure]:
        tiles.append(("failures of workers", str(len(lost)), f"{readable.seconds(sum(lost))} to recover"))
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile"><div class="name">{safe(name)}</div><div class="value">{safe(value)}</div>'
            f'<div class="below">{safe(below)}</div></div>'
            for name, value, below in tiles
        )
    )


def _curves(history: History) -> str:
    """Return the places of the charts, and what changes all of them. The script of the page draws."""
    if len(history) < 2:
        return _note("Curves begin with the second result.")
    places = [
        f'<figure class="card"><figcaption>{safe(base)}</figcaption><div class="chart" data-lines="'
        f'{safe(json.dumps([[name, color_of(name, index)] for index, name in enumerate(names)]))}"></div></figure>'
        for base, names in grouped(history).items()
    ]
    has_steps = len(history) <= _MOST_POINTS and all(readable.is_real(row.get("batch_count")) for row in history)
    over = '<label>over <select name="over"><option>epoch<option>step</select></label>' if has_steps else ""
    return (
        f'<p id="view">{over}<label><input type="checkbox" name="log">log axis</label><label>smoothing '
        '<input type="range" name="smooth" min="0" max="0.99" step="0.01" value="0"></label></p>'
        f'<noscript>{_note("Charts need JavaScript.")}</noscript><div class="charts">{"".join(places)}</div>'
    )


def _events(history: History) -> str:
    """Return what happened to the workers; the marks in the chart above have the numbers of this list."""
    items = "".join(f"<li>{told_at(event)} {safe(event)}</li>" for event in shown_events(history.events))
    return f"<ol>{items}</ol>" if items else _note("No worker was lost, and none was added.")


def _where_time_went(ledger: Mapping[str, float]) -> str:
    """Return what the time in training calls was spent on, as a bar and a table, and how long the rest took."""
    inside = {name: took for name, took in ledger.items() if name not in time_spent.OUTSIDE and took > 0}
    total, goodput = sum(inside.values()), time_spent.goodput_of(ledger)
    if goodput is None:
        return _note("There is no account of it.")
    shown = [name for name in time_spent.BINS if inside.get(name, 0.0) >= time_spent.SHOWN_FROM * total]
    colors = ["bad" if name in _BAD else str(index % NUM_COLORS) for index, name in enumerate(shown)]
    parts = [(time_spent.BINS[name], color, inside.pop(name)) for name, color in zip(shown, colors, strict=True)]
    if inside:
        parts.append((f"{len(inside)} more, each below {time_spent.SHOWN_FROM:.1%}", "other", sum(inside.values())))
    bar = "".join(f'<i class="c{color}" style="flex-grow:{took / total:.5f}"></i>' for _, color, took in parts)
    keys = "".join(
        f'<tr><td><i class="swatch c{color}"></i>{safe(words)}</td><td>{readable.seconds(took)}</td>'
        f"<td>{took / total:.1%}</td></tr>"
        for words, color, took in parts
    )
    outside = [(time_spent.BINS[name], ledger[name]) for name in time_spent.OUTSIDE if name in ledger]
    note = f"Time of all workers together. Goodput {goodput:.1%}: the share of it that was not lost to failures."
    if outside:
        note += (
            f" Outside of training calls: {', '.join(f'{what} {readable.seconds(took)}' for what, took in outside)}."
        )
    return f'<div class="card"><div class="stack">{bar}</div><table class="keys">{keys}</table></div>{_note(note)}'


def _results(history: History) -> str:
    """Return the metrics of the last epochs as a table, and behind a click the rest of their rows."""
    rows = [*history][-_MOST_ROWS:]
    metrics = readable.metrics_of(rows)
    others = ["epoch", *(name for name in readable.names_in(rows) if name not in {*metrics, "epoch"})]
    cells = [[readable.number(row.get(name, ""))[:80] for name in others] for row in rows]
    rest = _folded("Counts and other values", _table(others, cells))
    told = f"The last {_MOST_ROWS} of {len(history)} rows. The source of this page has {_MOST_POINTS} of them at most."
    return _table(*table_of(rows, metrics, _MOST_ROWS)) + (_note(told) if len(history) > len(rows) else "") + rest


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f'<div class="card table">{cards.grid(head, rows, "numbers")}</div>'


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{safe(title)}</summary>{body}</details>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{body}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{safe(text)}</p>'


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
