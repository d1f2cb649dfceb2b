"""`HTMLReport`: a run as one HTML file that needs nothing else, written again after every epoch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd._files import check_path, replacing
from raysgd._text.cards import grid, safe, two_column_table
from raysgd._text.log_lines import Once
from raysgd._text.secrets import masked
from raysgd._version import __version__
from raysgd.callbacks.callback import Callback, Run
from raysgd.engine.shared.time_spent import (
    AGAIN,
    BINS,
    DATA,
    EXCHANGE,
    RECOVERY,
    SLOWER_RANK,
    SNAPSHOT,
    USEFUL,
    goodput_of,
)
from raysgd.history import readable
from raysgd.history.charts import Mark, Span, figure, grouped_series, shown_events, time_line
from raysgd.history.history import CallRecord, History
from raysgd.writers.sink import failures_warned

if TYPE_CHECKING:
    from raysgd.engine.shared.group_events import GroupEvent


_PACKAGES = ("ray", "torch", "tensorflow", "keras", "lightning", "transformers", "numpy")
_OPTIONS = ("backend", "max_replicas", "use_gpu", "precision", "strategy", "min_workers", "spare_workers")
_NAMES_OF_OPTIONS = {"max_replicas": "num_workers"}
_LONG_S, _SHARE = 0.05, 50  # a report that takes longer to write than this may take a fiftieth of the time
_LONGEST_VALUE = 300
_MOST_ENTRIES = 500
DATA_ID = "raysgd-run"
_REFRESH_S = 10
_MOST_CHARTS = 24
_MOST_ROWS = 200
_MOST_SPANS = 400
_MOST_POINTS = 2000  # of each curve, in the data of the page
_CALLS = {"train": "training", "validation": "validation", "test": "test", "predict": "prediction", "bad": "recovery"}
_MOST_SIZES = 6


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
            self._write(run, "failed", masked(f"{type(error).__name__}: {error}"))
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
            self._write_page(run, state, reason)

    def _write_page(self, run: Run, state: str, reason: str) -> None:
        began, path = time.monotonic(), self.path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = page_of(facts_of(run, state, reason), run.history)
        with replacing(str(path)) as file:
            file.write(page.encode("utf-8", errors="replace"))
        took = time.monotonic() - began
        self._rest_until = began + took * _SHARE if took > _LONG_S else 0.0


def facts_of(run: Run, state: str, reason: str = "") -> dict[str, Any]:
    """Return what there is to tell of a run besides its history, as it stands in the data of the page.

    Args:
        run: The run.
        state: "running", "finished", "stopped" or "failed".
        reason: Why it was stopped or failed.
    """
    return {
        "name": str(run.name),
        "state": state,
        "reason": reason,
        "epoch": run.epoch,
        "epochs": run.epochs,
        "started_at": run.started_at,
        "written_at": time.time(),
        "trainer": _options_of(run.trainer),
        "config": dict(_flat(masked(run.config))),
        "versions": _versions(),
        "ledger": {} if run.trainer is None else run.trainer.ledger().total(),
    }


def _options_of(trainer: Any) -> dict[str, str]:
    if trainer is None:
        return {}
    operator = getattr(trainer, "training_operator_cls", None)
    told = {"trainer": type(trainer).__name__, "operator": getattr(operator, "__qualname__", "")}
    told |= {_NAMES_OF_OPTIONS.get(name, name): str(getattr(trainer, name, "")) for name in _OPTIONS}
    return {name: value for name, value in told.items() if value not in ("", "None")}


def _flat(config: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries of a config and of the dicts in it, with dots between their names."""
    for number, (key, value) in enumerate(config.items()):
        name = f"{above}{key}"
        if number >= _MOST_ENTRIES:
            yield f"{above}...", f"{len(config) - number} more"
            return
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _shortened(value)


def _shortened(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # a value of the user: its `repr` must not end the run
        text = f"a {type(value).__name__} that cannot be shown: {type(error).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text):,} characters)"


def _versions() -> dict[str, str]:
    """Return the versions of what is imported already: nothing is imported for this."""
    found = {"raysgd": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            found[package] = _version_of(package)
    return {**found, "system": platform.platform(), "host": platform.node()}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[package], "__version__", "unknown"))


_BIN_CLASSES = {
    USEFUL: "train", DATA: "c3", EXCHANGE: "c1", SLOWER_RANK: "c5", SNAPSHOT: "c2", AGAIN: "bad",
    **dict.fromkeys(RECOVERY, "bad"),
}  # fmt: skip


def page_of(facts: Mapping[str, Any], history: History) -> str:
    """Return the page. It refreshes itself as long as the run goes on."""
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if facts["state"] == "running" else ""
    sections = [
        _header(facts),
        _tiles(history),
        _section("Metrics", _curves(history)),
        _section("What happened when", _what_happened(history)),
        _where_time_went(facts["ledger"]),
        _section("Results", _results(history)),
        f'<div class="columns">{_table_of("Trainer", facts["trainer"])}{_table_of("Configuration", facts["config"])}'
        f"{_table_of('Versions', facts['versions'])}</div>",
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}
<title>{safe(facts["name"])}: {safe(facts["state"])}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{"".join(sections)}
<footer>Written by raysgd at {_moment(facts["written_at"])}. The data of this page is in its source, as JSON.</footer>
</main>
<script type="application/json" id="{DATA_ID}">{_data(facts, history)}</script>
</body>
</html>
"""


def _data(facts: Mapping[str, Any], history: History) -> str:
    content = json.dumps({"run": facts, "history": history.thinned(_MOST_POINTS).as_data()})
    return content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ------------------------------------------------------------------------------------------------ the top of the page


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
    tiles = [_tile(name, *_last_and_first(history, name)) for name in _headline_metrics(history)]
    speeds = [speed for record in _trainings(history) if (speed := _speed(record)) is not None]
    if speeds:
        tiles.append(_tile("throughput", readable.rate(speeds[-1]), f"at best {readable.rate(max(speeds))}"))
    counts = [record.num_workers for record in history.records]
    if counts:
        tiles.append(_tile("workers", str(counts[-1]), _sizes(history)))
    losses = [event for event in history.events if event.is_failure]
    if losses:
        took = readable.seconds(sum(event.seconds for event in losses))
        tiles.append(_tile("failures of workers", str(len(losses)), f"{took} to recover"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _sizes(history: History) -> str:
    """Return the numbers of workers that there were, in their order."""
    changes = [event for event in shown_events(history.events) if event.is_failure or event.old_size != event.new_size]
    if not changes:
        return "all the time"
    sizes = [changes[0].old_size, *(event.new_size for event in changes)]
    if len(set(sizes)) == 1:
        return f"{sizes[0]} again after each failure"
    if len(sizes) > _MOST_SIZES:
        return f"between {min(sizes)} and {max(sizes)}"
    return " → ".join(map(str, sizes))


def _headline_metrics(history: History) -> list[str]:
    """Return the metrics that say most: those of validation if there are any."""
    names = readable.metrics_of(history)
    validation = [name for name in names if name.startswith("val_")]
    return (validation or [name for name in names if name != "lr"])[:3]


def _last_and_first(history: History, name: str) -> tuple[str, str]:
    values = [row[name] for row in history if readable.is_real(row.get(name))]
    if not values:
        return "none", "no finite value"
    return readable.number(values[-1]), f"from {readable.number(values[0])}" if len(values) > 1 else "first epoch"


def _tile(name: str, value: str, below: str) -> str:
    return (
        f'<div class="tile"><div class="name">{safe(name)}</div><div class="value">{safe(value)}</div>'
        f'<div class="below">{safe(below)}</div></div>'
    )


# ------------------------------------------------------------------------------------------------ curves


def _curves(history: History) -> str:
    groups = grouped_series(history)
    charts = [figure(base, series, "card") for base, series in groups[:_MOST_CHARTS]]
    left_out = len(groups) - len(charts)
    more = f'<p class="note">{left_out} more are in the results below.</p>' if left_out > 0 else ""
    return f'<div class="charts">{"".join(charts)}</div>{more}' if charts else _nothing("No results yet.")


# ------------------------------------------------------------------------------------------------ time


def _trainings(history: History) -> list[CallRecord]:
    return [record for record in history.records if record.kind == "train"]


def _speed(record: CallRecord) -> float | None:
    return readable.samples_per_s({**record.metrics, "seconds": record.seconds})


def _what_happened(history: History) -> str:
    if not history.records:
        return _nothing("No calls were recorded.")
    zero = min(record.began_at for record in history.records[-_MOST_SPANS:])
    events = [event for event in shown_events(history.events) if event.at >= zero]
    spans = [_span(record, zero) for record in history.records[-_MOST_SPANS:]]
    spans += [_lost_span(event, zero) for event in events if _is_recovery(event)]
    marks = [
        Mark(_began(event, zero), "bad" if event.is_failure or event.kind == "hung" else "change", number, str(event))
        for number, event in enumerate(events, start=1)
    ]
    kinds = dict.fromkeys(span.kind for span in spans)
    legend = "".join(
        f'<span class="key"><i class="{safe(kind)}"></i>{safe(_CALLS.get(kind, kind))}</span>' for kind in kinds
    )
    drawing = time_line(spans, marks, _workers_over_time(history, zero))
    table = _events(events, zero)
    if len(history.records) > _MOST_SPANS:
        table += f'<p class="note">The last {_MOST_SPANS} of {len(history.records)} calls.</p>'
    return f'<div class="card"><div class="legend">{legend}</div><div class="wide">{drawing}</div></div>{table}'


def _span(record: CallRecord, zero: float) -> Span:
    speed = _speed(record) if record.kind == "train" else None
    told = f"{_CALLS.get(record.kind, record.kind)}, epoch {record.epoch}: {readable.seconds(record.seconds)}"
    told += f", {readable.rate(speed)}" if speed is not None else ""
    begin = record.began_at - zero
    return Span(begin, begin + record.seconds, record.kind, told, speed)


def _lost_span(event: GroupEvent, zero: float) -> Span:
    return Span(_began(event, zero), event.at - zero, "bad", f"recovery: {readable.seconds(event.seconds)}")


def _began(event: GroupEvent, zero: float) -> float:
    """Return the second in which an event began; it may have done so before the first call that is shown."""
    return max(0.0, event.began_at - zero)


def _workers_over_time(history: History, zero: float) -> list[tuple[float, int]]:
    """Return how many workers were at work from which second on: none in a recovery."""
    changes = [event for event in shown_events(history.events) if event.at >= zero]
    first = changes[0].old_size if changes else history.records[0].num_workers
    steps = [(0.0, first)]
    for event in changes:
        steps += [(_began(event, zero), 0)] if _is_recovery(event) else []
        steps.append((event.at - zero, event.new_size))
    last = history.records[-1]
    if steps[-1][1] != last.num_workers:
        steps.append((last.began_at - zero, last.num_workers))
    return sorted(steps)


def _events(events: Sequence[GroupEvent], zero: float) -> str:
    if not events:
        return '<p class="note">No worker was lost, and none was added.</p>'
    rows = [
        (
            str(number),
            f"+{readable.seconds(_began(event, zero))}",
            event.kind,
            f"{event.old_size} → {event.new_size}",
            readable.seconds(event.seconds),
            f"{event.cause}; {event.detail}" if event.detail else event.cause,
        )
        for number, event in enumerate(events, start=1)
    ]
    return _table(("", "after", "what", "workers", "took", "why"), rows, kind="words")


def _where_time_went(ledger: Mapping[str, float]) -> str:
    """Return the ledger of all ranks together: a bar with a part for each bin, and a table of them."""
    total, goodput = sum(ledger.values()), goodput_of(ledger)
    if not total:
        return ""
    bins = [(words, _BIN_CLASSES.get(name, "other"), ledger[name]) for name, words in BINS.items() if name in ledger]
    bar = "".join(
        f'<i class="{kind}" style="flex-grow:{took / total:.5f}" title="{safe(words)}"></i>'
        for words, kind, took in bins
        if took > 0
    )
    keys = "".join(
        f'<tr><td><i class="swatch {kind}"></i>{safe(words)}</td><td>{readable.seconds(took)}</td>'
        f"<td>{took / total:.1%}</td></tr>"
        for words, kind, took in bins
    )
    note = "The time of all workers together, since the trainer started."
    if goodput is not None:
        note += f" Goodput {goodput:.1%}: of the time in training calls, the share that was not lost to failures."
    drawn = f'<div class="card"><div class="stack">{bar}</div><table class="keys">{keys}</table></div>'
    return _section("Where the time went", f'{drawn}<p class="note">{safe(note)}</p>')


def _is_recovery(event: GroupEvent) -> bool:
    """Return whether no step was taken until it was over; `hung` is the time the others waited for a worker."""
    return event.kind in ("hung", "continued", "restored", "lost", "grown", "left")


# ------------------------------------------------------------------------------------------------ tables


def _results(history: History) -> str:
    rows = [*history][-_MOST_ROWS:]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return _nothing("No results yet.")
    metrics = readable.metrics_of(rows)
    names.sort(key=lambda name: (name != "epoch", name not in metrics))
    cells = [[_cell(name, row.get(name, "")) for name in names] for row in rows]
    told = f"The last {_MOST_ROWS} of {len(history)} rows; the data in the source of this page has {_in_data(history)}."
    left_out = f'<p class="note">{told}</p>' if len(history) > len(rows) else ""
    return _table(names, cells, kind="numbers") + left_out


def _in_data(history: History) -> str:
    return "all" if len(history) <= _MOST_POINTS else f"{_MOST_POINTS} of them, evenly chosen"


def _cell(name: str, value: Any) -> str:
    if name.endswith("seconds") and readable.is_real(value):
        return f"{value:.2f}"
    text = readable.number(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    return f'<div class="card table">{grid(head, rows, kind)}</div>'


def _table_of(title: str, facts: Mapping[str, str]) -> str:
    table = two_column_table(facts.items(), "facts")
    return _section(title, f'<div class="card table">{table}</div>') if facts else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{safe(title)}</h2>{body}</section>"


def _nothing(text: str) -> str:
    return f'<p class="nothing">{safe(text)}</p>'


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


STYLE = """
:root{color-scheme:light dark;--page:#f6f6f4;--card:#fff;--ink:#16181b;--soft:#52565c;--faint:#7d8288;--rule:#e3e4e1;
 --axis:#b9bcb8;--c0:#2a78d6;--c1:#e0662f;--c2:#1a9a6c;--c3:#c08a00;--c4:#d0568a;--c5:#5a49b8;--other:#c9ccc9;
 --bad:#d03b3b;--change:#8a6d00;--good:#16833f}
@media (prefers-color-scheme:dark){:root{--page:#101213;--card:#191c1e;--ink:#f2f3f3;--soft:#c0c4c8;--faint:#8d9399;
 --rule:#2c3033;--axis:#474c50;--c0:#4b97ee;--c1:#ee7d49;--c2:#2cb888;--c3:#d9a520;--c4:#e07aa6;--c5:#9a8df0;
 --other:#4a4f53;--bad:#f0625d;--change:#d9a520;--good:#4fbf7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink)}
body{font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 40px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:4px 14px;margin-bottom:20px}
h1{font-size:24px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:28px 0 10px}
header p{flex-basis:100%;margin:0;color:var(--soft)}
header p.reason{color:var(--ink);overflow-wrap:anywhere}
.state{font-size:12px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor}
.state.running{color:var(--c0)}.state.finished{color:var(--good)}.state.stopped{color:var(--change)}
.state.failed{color:var(--bad)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 16px;margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 14px;min-width:0}
.tile .name{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
.tile .value{font-size:20px;font-weight:600;line-height:1.3;white-space:nowrap}
.tile .below{color:var(--faint);font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:12px}
figure.card{padding:12px 14px 8px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;margin-bottom:6px;font-size:13px;overflow-wrap:anywhere}
figcaption b{font-weight:600;margin-right:auto}
.key{display:inline-flex;align-items:center;gap:6px;color:var(--soft);font-size:12px}
.key i,.swatch,.stack i{background:currentColor}
.key i,.swatch{width:10px;height:10px;border-radius:2px;display:inline-block;flex:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 8px 92px}
svg{display:block;width:100%;height:auto;overflow:visible}
.wide{overflow-x:auto}.wide svg{min-width:680px}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--axis);stroke-width:1}
.ink,.name{fill:var(--faint);font-size:11px;font-variant-numeric:tabular-nums}.name{fill:var(--soft);font-size:12px}
.c0,.train{color:var(--c0)}.c1,.validation{color:var(--c1)}.c2,.test{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5,.predict{color:var(--c5)}.bad{color:var(--bad)}.change{color:var(--change)}.other{color:var(--other)}
.line,.level{fill:none;stroke:currentColor;stroke-width:2}.line{stroke-linejoin:round;stroke-linecap:round}
.level{color:var(--c0)}.dot{fill:currentColor;stroke:var(--card);stroke-width:1}rect{fill:currentColor}
.mark line{stroke:currentColor;stroke-width:1;stroke-dasharray:3 3}.mark circle{fill:currentColor}
.mark text{fill:var(--card);font-size:11px;font-weight:600}
.stack{display:flex;height:22px;gap:2px;border-radius:4px;overflow:hidden;margin-bottom:10px}
.stack i{display:block;flex-basis:0;min-width:2px}
table{border-collapse:collapse;font-size:13px}
th,td{padding:4px 16px 4px 0;text-align:left;vertical-align:top}
th{font-weight:500;color:var(--soft)}
.keys td:nth-child(n+2),.numbers td,.numbers th{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.keys .swatch{margin-right:8px}.keys td:first-child{padding-left:18px;text-indent:-18px}
.table{overflow:auto;max-height:420px;padding:6px 16px}
.numbers td,.words td{border-top:1px solid var(--rule)}
.numbers th,.words th{position:sticky;top:-6px;background:var(--card)}
.numbers td:last-child,.numbers th:last-child{padding-right:0}
.words td:nth-child(-n+5){white-space:nowrap}
.words,.numbers{width:100%}.words td:last-child{width:99%;min-width:220px;padding-right:0}
.facts td{overflow-wrap:anywhere}.facts th{white-space:nowrap}
.card + .card{margin-top:12px}.charts .card + .card{margin-top:0}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:0 16px;align-items:start}
.note,.nothing,footer{color:var(--faint);font-size:12px;margin:8px 0 0}
footer{margin-top:32px}
@media (max-width:560px){main{padding:18px 16px 28px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}}
@media (max-width:560px){.tile .value{font-size:18px;white-space:normal;overflow-wrap:anywhere}.legend{margin-left:0}}
@media print{body{background:#fff}.table{max-height:none}}
"""
