"""The HTML report: its numbers are those of the history, it needs nothing else, and all text in it is text.

Covers `raysgd.callbacks.report`, which makes the page. A browser draws its charts, where there is one.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd.callbacks import HTMLReport, Run
from raysgd.callbacks import report as report_module
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.history.history import CallRecord, History
from raysgd.core.numbers.timing import TimeLedger
from tests.helpers.run_if import RunIf

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' & <!--"


class Page(HTMLParser):
    """What a browser finds in a page.

    Attributes:
        tags: Each tag with its attributes.
        text: What is to be read.
        data: The JSON in it.
        scripts: What a browser would run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: Any = None
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script" and self.data is None:
            self.data = json.loads(data)
        elif self._inside == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.text += f"{data}\n"

    @property
    def charts(self) -> list[list[str]]:
        """The names of the lines of each chart."""
        return list(self.data["charts"])

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def make_history() -> History:
    history = History()
    history.events.append(GroupEvent("started", 0, 4, 1.0, "the trainer was created", at=99.0))
    for epoch in range(1, 5):
        began = 100.0 + 10 * epoch
        workers = 4 if epoch < 3 else 3
        train = {"num_samples": 600, "batch_count": 10, "train_loss": 1 / epoch, "last_train_loss": 0.1, "lr": 0.1}
        history.add(CallRecord("train", epoch, train, began, 6.0, workers))
        history.add(CallRecord("validation", epoch, {"val_loss": 2 / epoch, "accuracy": 0.5}, began + 6, 2.0, workers))
    history.events.append(GroupEvent("continued", 4, 3, 1.5, "rank 1 was lost", "no sample was lost", at=133.0))
    return history


def make_run(folder: Path, history: History | None = None, **options: Any) -> Run:
    run = Run(**{"name": "Line", "trainer": None, "epochs": 4, "folder": folder, **options})
    run.history = make_history() if history is None else history
    run.epoch = len(run.history)
    return run


def written(run: Run) -> Page:
    report = HTMLReport()
    report.on_run_end(run, None)
    return Page(report.path(run))


def test_the_numbers_in_the_page_are_those_of_the_history(tmp_path: Path) -> None:
    run = make_run(tmp_path, config={"lr": 0.1, "model": {"width": 8, "empty": {}}})
    page = written(run)
    found = History.from_json(json.dumps(page.data["history"]))
    assert [*found] == [*run.history]
    assert found.records == run.history.records
    assert found.events == run.history.events
    assert page.data["run"]["config"] == {"lr": "0.1", "model": "{'empty': {}, 'width': 8}"}
    assert (page.data["run"]["name"], page.data["run"]["epoch"], page.data["run"]["state"]) == ("Line", 4, "finished")


def test_each_metric_has_a_chart_with_its_sister_of_validation(tmp_path: Path) -> None:
    assert written(make_run(tmp_path)).charts == [["train_loss", "val_loss"], ["val_accuracy"], ["lr"]]


def test_no_chart_is_empty_and_none_is_drawn_twice(tmp_path: Path) -> None:
    history = History()
    for epoch in range(1, 4):
        history.add_row({"loss": 1 / epoch, "train_loss": 1 / epoch, "val_accuracy": math.nan, "note": "x"})
    assert written(make_run(tmp_path, history=history, epochs=None)).charts == [["loss"]]
    first = History()
    first.add_row({"loss": 1.0})
    page = written(make_run(tmp_path, history=first))
    assert page.charts == []
    assert "Curves begin with the second result." in page.text


def test_a_run_of_one_epoch_has_the_curve_of_its_steps(tmp_path: Path) -> None:
    history, report = History(), HTMLReport()
    history.add_row({"epoch": 1, "train_loss": 0.75, "val_loss": 0.5, "batch_count": 100})
    run = make_run(tmp_path, history=history)
    report.on_run_begin(run)
    assert "Curves begin with the second result." in Page(report.path(run)).text
    for step in (50, 100):
        report.on_step_metrics(run, step, {"train_loss": 50 / step, "odd": math.nan})
    report.on_run_end(run, None)
    page = Page(report.path(run))
    assert page.charts == [["train_loss", "val_loss"]]
    assert page.data["steps"] == [
        {"step": 50, "train_loss": 1.0, "odd": None},
        {"step": 100, "train_loss": 0.5, "odd": None},
    ]


def test_the_ledger_tells_of_the_time_in_training_calls(tmp_path: Path) -> None:
    ledger = TimeLedger(
        {
            0: {"useful": 60.0, "data": 10.0, "recovery_form": 10.0, "start_up": 2.5, "undo": 0.1, "other": 0.2},
            1: {"useful": 20.0, "driver": 84.0},
        }
    )
    page = written(make_run(tmp_path, trainer=SimpleNamespace(ledger=lambda: ledger)))
    assert page.data["run"]["ledger"] == ledger.total()
    shares = re.findall(r"^(.+)\n(\d.+)\n([\d.]+%)$", page.text, re.MULTILINE)
    assert shares == [
        ("useful steps", "1 min 20 s", "79.8%"),
        ("waiting for data", "10.0 s", "10.0%"),
        ("recovery: forming a new group", "10.0 s", "10.0%"),
        ("the rest, each part below 0.5%", "0.30 s", "0.3%"),
    ]
    assert [each["style"] for each in page.all("i")][1:] == ["width:9.97%", "width:9.97%", "width:0.30%"]
    assert "Goodput 89.9%" in page.text
    assert "Outside of training calls: start-up 2.5 s, driver (between calls) 1 min 24 s." in page.text
    assert "There is no account of it." in written(make_run(tmp_path)).text


def test_what_happened_to_the_workers_is_told(tmp_path: Path) -> None:
    page = written(make_run(tmp_path))
    assert len(page.all("li")) == 1, "the start is left out"
    assert "rank 1 was lost; resumed with 3 instead of 4 workers after 1.50 s; no sample was lost" in page.text
    assert "3 to 4 workers, 1 failure of workers" in page.text
    quiet = make_history()
    quiet.events.clear()
    assert "No worker was lost, and none was added." in written(make_run(tmp_path, history=quiet)).text


def test_a_run_that_was_resumed_tells_its_time_since_then(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.started_at = 128.5
    text = written(run).text
    assert "epoch 4 of 4, continued after epoch 2 at " in text
    assert " since then, 3 to 4 workers" in text
    run.started_at = 99.0
    assert "since then" not in written(run).text


def test_metrics_are_in_a_table_and_the_rest_is_folded(tmp_path: Path) -> None:
    page = written(make_run(tmp_path, config={"lr": 0.1}))
    shown, _, folded = page.text.partition("Counts and other values")
    assert "epoch train_loss lr val_loss val_accuracy time 1 " in " ".join(shown.split())
    assert "last_train_loss" not in shown
    assert "last_train_loss" in folded
    assert len(page.all("details")) == 3, "the rest, the configuration, the versions"


def test_the_page_needs_nothing_else_and_runs_its_own_scripts_alone(tmp_path: Path) -> None:
    page = written(make_run(tmp_path))
    assert not {"link", "iframe", "img", "object", "embed", "form", "a"} & {tag for tag, _ in page.tags}
    nonce = page.all("script")[1]["nonce"] or ""
    assert page.all("script") == [{"type": "application/json", "id": "raysgd-run"}, {"nonce": nonce}, {"nonce": nonce}]
    [policy] = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    assert len(nonce) > 20
    assert nonce != written(make_run(tmp_path)).all("script")[1]["nonce"]
    source = (tmp_path / "report.html").read_text()
    assert re.findall(r"https?://\S+", source) == ["https://github.com/leeoniya/uPlot"], "in a comment"
    assert "The MIT License" in page.scripts[0]
    assert "@import" not in source
    assert "url(" not in source
    assert "prefers-color-scheme:dark" in source


def test_names_values_and_reasons_are_text(tmp_path: Path) -> None:
    history = History([GroupEvent("restored", 2, 2, 1.0, HOSTILE, HOSTILE, at=101.0)])
    history.add(CallRecord("train", 1, {HOSTILE: 0.5, "note": HOSTILE}, 100.0, 5.0, 2))
    history.add(CallRecord("train", 2, {HOSTILE: 0.25}, 106.0, 5.0, 2))
    history.add(CallRecord(HOSTILE, 2, {}, 111.0, 5.0, 2))  # type: ignore[arg-type]  # out of a file
    run = make_run(tmp_path, name=HOSTILE, history=history, config={HOSTILE: HOSTILE, "nested": {HOSTILE: object()}})
    report = HTMLReport()
    report.on_run_end(run, ValueError(HOSTILE))
    page = Page(report.path(run))
    assert len(page.all("script")) == 3
    assert page.all("img") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 5
    assert page.data["run"]["config"][HOSTILE] == repr(HOSTILE)
    assert HOSTILE in page.data["history"]["rows"][0]


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_config_entries_that_cannot_or_should_not_be_shown(tmp_path: Path) -> None:
    config = {
        "wandb_api_key": "abc",
        "db": {"password": "xyz"},
        "max_tokens": 7,
        "long": "x" * 10_000,
        "broken": Broken(),
        "odd\udcff": 1,
        **{f"entry{number}": number for number in range(600)},
    }
    page = written(make_run(tmp_path, config=config))
    found = page.data["run"]["config"]
    assert (found["wandb_api_key"], found["db"], found["max_tokens"]) == ("'***'", "{'password': '***'}", "7")
    assert len(found["long"]) < 400
    assert found["broken"].startswith("<Broken instance at")
    assert len(found) == 500


@pytest.mark.parametrize(
    "values",
    [
        [math.nan, math.nan],
        [math.inf, 1.0, -math.inf],
        [0.0, 0.0],
        [1e300, -1e300],
        [10**400, -(10**400)],
        [5e-324, 1.0],
        [1e-9, 1.0000001e-9],
        [np.float32(0.5), np.int64(3)],
        [True, "text", None],
        [-3.0],
        [],
    ],
)
def test_any_values_can_be_drawn(values: list[Any], tmp_path: Path) -> None:
    history = History()
    for epoch, value in enumerate(values, start=1):
        history.add(CallRecord("train", epoch, {"x": value}, 100.0 + epoch, 0.0, 1))
    page = written(make_run(tmp_path, history=history))
    assert len(page.data["history"]["rows"]) == len(values)
    can_be_drawn = [isinstance(value, float | np.generic) and abs(float(value)) < 1e100 for value in values]
    assert page.charts == ([["x"]] if any(can_be_drawn) and len(values) > 1 else [])


@RunIf(programs=["chromium"])
def test_a_browser_draws_every_chart_whatever_its_metric_is_called(tmp_path: Path) -> None:
    history = History([GroupEvent("continued", 2, 1, 1.0, HOSTILE, at=103.0)])
    for epoch in range(1, 4):
        gap = math.nan if epoch == 2 else 1.0
        odd = {HOSTILE: 0.5, "__proto__": epoch, "huge": 10**400, "wide": (-1) ** epoch * 1e99, "gap": gap}
        history.add(CallRecord("train", epoch, {"num_samples": 8, **odd}, 100.0 + epoch, 0.5, 2))
    report, run = HTMLReport(), make_run(tmp_path, history=history)
    report.on_run_end(run, None)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    shown = subprocess.run([*command, report.path(run).as_uri()], capture_output=True, text=True, timeout=60)
    (tmp_path / "drawn.html").write_text(shown.stdout)
    page = Page(tmp_path / "drawn.html")
    assert "CONSOLE" not in shown.stderr
    assert len(page.all("canvas")) == len(page.charts) + 1, "and the throughput over time"
    assert page.charts == [[HOSTILE], ["__proto__"], ["wide"], ["gap"]]
    assert page.all("img") == []


def test_the_page_refreshes_itself_as_long_as_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run, report = make_run(tmp_path), HTMLReport("watch/r.html")
    monkeypatch.chdir(tmp_path)

    def refreshes() -> bool:
        return any(each.get("http-equiv") == "refresh" for each in Page(report.path(run)).all("meta"))

    report.on_run_begin(run)
    assert report.path(run) == tmp_path / "elsewhere" / "watch" / "r.html"
    assert refreshes()
    report.on_result(run, {})
    assert refreshes()
    run.history.stop_reason = "good enough"
    report.on_run_end(run, None)
    assert not refreshes()
    assert "stopped" in Page(report.path(run)).text
    assert "good enough" in Page(report.path(run)).text


def test_a_reader_never_sees_half_a_page(tmp_path: Path) -> None:
    """The file takes its name when it is complete: an open file keeps the page that it was opened with."""
    run, report = make_run(tmp_path), HTMLReport()
    report.on_run_begin(run)
    with open(report.path(run), encoding="utf-8") as reader:
        begin = reader.read(100)
        report.on_result(run, {})
        text = begin + reader.read()
    assert text.endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_page_of_a_very_long_run_is_of_bounded_size_and_has_numbers_of_its_whole_length(tmp_path: Path) -> None:
    history = History()
    for epoch in range(1, 5001):
        history.add(CallRecord("train", epoch, {"train_loss": 1 / epoch}, 100.0 + epoch, 0.5, 2))
        history.add(CallRecord("validation", epoch, {"val_loss": 1 / epoch}, 100.0 + epoch, 0.5, 2))
    page = written(make_run(tmp_path, history=history))
    epochs = [row["epoch"] for row in page.data["history"]["rows"]]
    assert (len(epochs), epochs[0], epochs[-1]) == (2000, 1, 5000)
    assert {after - before for before, after in itertools.pairwise(epochs)} == {2, 3}
    assert len(page.data["history"]["records"]) == 4000
    assert len(page.all("tr")) < 500
    assert "The last 200 of 5000 rows. The source of this page has 2000 of them at most." in page.text


def test_a_page_that_takes_long_to_write_is_not_written_after_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pages = [0.0], []

    def slow_page(facts: dict[str, Any], history: History, steps: Any) -> str:
        now[0] += 1.0
        pages.append(facts["state"])
        return "page"

    monkeypatch.setattr(report_module, "page_of", slow_page)
    monkeypatch.setattr(report_module.time, "monotonic", lambda: now[0])
    run, report = make_run(tmp_path), HTMLReport()
    report.on_run_begin(run)
    for _ in range(100):
        now[0] += 1.0
        report.on_result(run, {})
    report.on_run_end(run, None)
    assert pages == ["running", "running", "running", "finished"]


@pytest.mark.parametrize(
    ("path", "error"), [("", ValueError), ("s3://bucket/report.html", ValueError), (3, TypeError), (b"x", TypeError)]
)
def test_what_is_no_path_is_refused(path: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="path="):
        HTMLReport(path)


def test_a_report_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    report, run = HTMLReport(tmp_path / "file" / "report.html"), Run(name="run", folder=tmp_path)
    report.on_run_begin(run)
    report.on_run_end(run, None)
    assert caplog.text.count("HTMLReport: could not write") == 1
