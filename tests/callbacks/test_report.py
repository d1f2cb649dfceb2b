"""The HTML report: its numbers are those of the history, it needs nothing else, and all text in it is text.

Covers `raysgd.callbacks.report`, which makes the page.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd.callbacks import HTMLReport, Run
from raysgd.callbacks import report as report_module
from raysgd.callbacks.report import DATA_ID
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.engine.shared.time_spent import TimeLedger
from raysgd.history.history import CallRecord, History

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' & <!--"


class Page(HTMLParser):
    """What a browser finds in a page.

    Attributes:
        tags: Each tag with its attributes.
        text: What is to be read.
        data: The JSON in it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: Any = None
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.data = json.loads(data)
        elif not self._inside:
            self.text += f"{data}\n"

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


def make_run(folder: Path, **options: Any) -> Run:
    options = {"name": "Line", "trainer": None, "epochs": 4, "history": make_history(), "folder": folder} | options
    run = Run(**options)
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
    assert page.data["run"]["config"] == {"lr": "0.1", "model.width": "8", "model.empty": "{}"}
    assert (page.data["run"]["name"], page.data["run"]["epoch"], page.data["run"]["state"]) == ("Line", 4, "finished")


def test_the_curves_go_through_the_numbers(tmp_path: Path) -> None:
    """Each point tells its value; and points that are equal in value are equal in height."""
    history = make_history()
    run = make_run(tmp_path, history=history)
    source = written(run)
    titles = re.findall(r"(\w+) = (\S+) at epoch (\d+)", source.text)
    told = {(name, int(epoch)): float(value) for name, value, epoch in titles}
    expected = {
        (name, row["epoch"]): row[name] for row in history for name in ("train_loss", "val_loss", "val_accuracy")
    }
    for key, value in expected.items():
        assert told[key] == pytest.approx(value, rel=1e-3)
    circles = [(each["class"], float(each["cx"] or 0), float(each["cy"] or 0)) for each in source.all("circle")[:8]]
    train, validation = circles[:4], circles[4:]
    assert [x for _, x, _ in train] == [x for _, x, _ in validation]
    assert all(v[2] < t[2] for t, v in zip(train, validation, strict=True)), "the loss of validation is the larger one"
    assert train[1][2] == pytest.approx(validation[3][2], abs=0.11), "1/2 and 2/4 are equally high"


def test_the_ledger_of_the_ranks_is_drawn(tmp_path: Path) -> None:
    ledger = TimeLedger({0: {"useful": 6.0, "data": 1.0, "recovery_form": 1.0}, 1: {"useful": 8.0, "driver": 84.0}})
    trainer = SimpleNamespace(ledger=lambda: ledger)
    page = written(make_run(tmp_path, trainer=trainer))
    assert page.data["run"]["ledger"] == {"useful": 14.0, "data": 1.0, "recovery_form": 1.0, "driver": 84.0}
    assert "Goodput 93.8%" in page.text
    assert "14.0%" in page.text
    titles = [each.get("title") for each in page.all("i")]
    assert "waiting for data" in titles
    assert "exchanging" not in titles


def test_losses_are_marked_where_they_happened(tmp_path: Path) -> None:
    page = written(make_run(tmp_path))
    marks = [attributes for attributes in page.all("g") if "mark" in (attributes["class"] or "")]
    assert [mark["class"] for mark in marks] == ["mark bad"]
    assert "rank 1 was lost; no sample was lost" in page.text
    assert "+21.5 s" in page.text
    assert "4 → 3" in page.text
    bars = [float(each["x"] or 0) for each in page.all("rect") if each["class"] == "train"]
    place = next(float(each["x1"] or 0) for each in page.all("line") if each.get("y1") == "18")
    assert bars[2] < place < bars[3]
    [recovery] = [each for each in page.all("rect") if each["class"] == "bad"]
    per_second = (bars[1] - bars[0]) / 10
    assert float(recovery["x"] or 0) == pytest.approx(place, abs=0.2)
    assert float(recovery["width"] or 0) == pytest.approx(1.5 * per_second, abs=0.7)
    assert page.text.split().count("recovery") == 1, "below the drawing"


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "all the time"),
        ([("continued", 4, 3)], "4 → 3"),
        ([("continued", 4, 3), ("grown", 3, 4)], "4 → 3 → 4"),
        ([("hung", 4, 4), ("restored", 4, 4)], "4 again after each failure"),
        ([("continued", 4, 3), ("grown", 3, 4)] * 4, "between 3 and 4"),
    ],
)
def test_the_numbers_of_workers_are_named(tmp_path: Path, events: list[Any], told: str) -> None:
    history = make_history()
    history.events[:] = [GroupEvent(kind, *sizes, 0.5, "lost", at=133.0) for kind, *sizes in events]
    assert told in written(make_run(tmp_path, history=history)).text


def test_no_worker_is_at_work_until_a_recovery_is_over(tmp_path: Path) -> None:
    page = written(make_run(tmp_path))
    [path] = [each["d"] or "" for each in page.all("path")]
    heights = [float(part) for part in re.findall(r"[,V]([\d.]+)", path)]
    low, high = max(heights), min(heights)
    assert heights == [high, low, pytest.approx(low - (low - high) * 3 / 4)]


def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    page = written(make_run(tmp_path))
    assert not {"link", "iframe", "img", "object", "embed", "form", "a"} & {tag for tag, _ in page.tags}
    assert page.all("script") == [{"type": "application/json", "id": DATA_ID}]
    policies = [each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    source = (tmp_path / "report.html").read_text()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", source) == []
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
    assert page.all("script") == [{"type": "application/json", "id": DATA_ID}]
    assert page.all("img") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 5
    assert page.data["run"]["config"][HOSTILE] == HOSTILE
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
    assert (found["wandb_api_key"], found["db.password"], found["max_tokens"]) == ("***", "***", "7")
    assert len(found["long"]) < 400
    assert found["broken"] == "a Broken that cannot be shown: RuntimeError"
    assert found["..."] == "106 more"


@pytest.mark.parametrize(
    "values",
    [
        [math.nan, math.nan],
        [math.inf, 1.0, -math.inf],
        [0.0, 0.0],
        [1e300, -1e300],
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
    places = [
        value for tag, attributes in page.tags for name, value in attributes.items() if name in ("cx", "cy", "x1")
    ]
    assert all(math.isfinite(float(place or "nan")) for place in places)
    assert len(page.data["history"]["rows"]) == len(values)


def test_a_function_without_calls_has_a_report_too(tmp_path: Path) -> None:
    history = History()
    for number in range(3):
        history.add_row({"loss": 1.0 / (number + 1)})
    page = written(make_run(tmp_path, history=history, epochs=None))
    assert len(page.all("circle")) == 3
    assert "No calls were recorded." in page.text


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


def test_a_long_run_has_a_page_of_bounded_size_with_all_numbers(tmp_path: Path) -> None:
    history = History()
    for epoch in range(1, 1201):
        history.add(CallRecord("train", epoch, {"train_loss": 1 / epoch}, 100.0 + epoch, 0.5, 2))
    page = written(make_run(tmp_path, history=history))
    assert len(page.data["history"]["rows"]) == 1200
    assert len(page.all("tr")) < 300
    assert len(page.all("rect")) == 400
    assert page.all("circle") == []
    [line] = page.all("polyline")
    assert 300 < len((line["points"] or "").split()) <= 600
    assert "The last 200 of 1200 rows; the data in the source of this page has all" in page.text


def test_the_page_of_a_very_long_run_has_numbers_of_its_whole_length(tmp_path: Path) -> None:
    history = History()
    for epoch in range(1, 5001):
        history.add(CallRecord("train", epoch, {"train_loss": 1 / epoch}, 100.0 + epoch, 0.5, 2))
        history.add(CallRecord("validation", epoch, {"val_loss": 1 / epoch}, 100.0 + epoch, 0.5, 2))
    page = written(make_run(tmp_path, history=history))
    epochs = [row["epoch"] for row in page.data["history"]["rows"]]
    assert (len(epochs), epochs[0], epochs[-1]) == (2000, 1, 5000)
    assert {after - before for before, after in itertools.pairwise(epochs)} == {2, 3}
    assert len(page.data["history"]["records"]) == 4000
    assert "The last 200 of 5000 rows; the data in the source of this page has 2000 of them" in page.text


def test_a_page_that_takes_long_to_write_is_not_written_after_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pages = [0.0], []

    def slow_page(facts: dict[str, Any], history: History) -> str:
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
