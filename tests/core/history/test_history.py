from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.history.history import CallRecord, CallRecorder, History, Kind, plain
from raysgd.core.numbers.results import name_in_test, validation_name

HOSTILE = "<script>$x^{$"


def record(kind: Kind, epoch: int = 1, /, **metrics: Any) -> CallRecord:
    return CallRecord(kind, epoch, metrics, began_at=100.0, seconds=2.0, num_workers=4)


def history_of(*records: CallRecord) -> History:
    history = History()
    for each in records:
        history.add(each)
    return history


class TestRows:
    def test_there_is_one_for_each_epoch(self) -> None:
        history = history_of(
            record("train", 1, train_loss=0.5, num_samples=8),
            record("validation", 1, val_loss=0.6, accuracy=0.9, num_samples=4),
            record("test", 1, test_loss=0.7),
            record("train", 2, train_loss=0.4),
        )
        told = {"seconds": 2.0, "num_workers": 4}
        first = {"epoch": 1, **told, "train_loss": 0.5, "num_samples": 8}
        first |= {"val_loss": 0.6, "val_accuracy": 0.9, "val_num_samples": 4, "val_seconds": 2.0}
        assert list(history) == [first, {"epoch": 2, **told, "train_loss": 0.4}]
        assert [each.kind for each in history.records] == ["train", "validation", "test", "train"]

    def test_validation_without_training_is_only_a_record(self) -> None:
        history = history_of(record("validation", val_loss=1.0))
        assert (len(history), len(history.records)) == (0, 1)

    def test_validation_of_a_callback_completes_no_row_of_fit_also_after_json(self) -> None:
        of_fit, after = (replace(record("train", n, train_loss=0.5), of_fit=n == 1) for n in (1, 2))
        others, own = record("validation", val_loss=9.0), replace(record("validation", val_loss=0.6), of_fit=True)
        history = History.from_json(history_of(of_fit, others).to_json())
        for each in (own, others, after, record("validation", 2, val_loss=0.7)):
            history.add(each)
        assert history["val_loss"] == [0.6, 0.7]
        assert [each.of_fit for each in history.records] == [True, False, True, False, False, False]

    def test_a_metric_can_be_read_over_all_epochs(self) -> None:
        history = history_of(record("train", 1, a=1), record("train", 2, b=2))
        assert history["a"] == [1, None]
        assert history[-1]["b"] == 2
        assert [row["epoch"] for row in history[0:2]] == [1, 2]
        with pytest.raises(KeyError, match="no epoch has the metric 'c': there are"):
            history["c"]


@pytest.mark.parametrize(
    ("name", "in_row", "in_test"),
    [
        ("val_loss", "val_loss", "test_loss"),
        ("last_val_loss", "last_val_loss", "last_test_loss"),
        ("validation_accuracy", "val_accuracy", "test_accuracy"),
        ("accuracy", "val_accuracy", "accuracy"),
        ("last_x", "last_val_x", "last_x"),
    ],
)
def test_names_say_which_data_a_metric_is_of(name: str, in_row: str, in_test: str) -> None:
    assert (validation_name(name), name_in_test(name)) == (in_row, in_test)


class TestJson:
    def test_brings_everything_back(self) -> None:
        history = history_of(record("train", 1, loss=0.1 + 0.2), record("validation", 1, val_loss=math.nan))
        history.events.append(GroupEvent("continued", 4, 3, 0.5, "rank 2 died", at=12.5))
        history.stop_reason = "enough"
        again = History.from_json(history.to_json())
        assert again[0]["loss"] == 0.1 + 0.2
        assert math.isnan(again[0]["val_loss"])
        assert again.records[0] == history.records[0]
        assert (again.events, again.stop_reason) == (history.events, "enough")

    def test_is_json_that_every_language_reads(self) -> None:
        history = history_of(record("train", 1, a=math.inf, b=np.float32(0.5), c=np.arange(3), d=object, e=(1, "x")))
        row = json.loads(history.to_json(), parse_constant=pytest.fail)["rows"][0]
        assert (row["a"], row["b"], row["c"], row["e"]) == (None, 0.5, [0, 1, 2], [1, "x"])
        assert row["d"] == str(object)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 1, "events": [], "records": []}', "[" * 100_000])
    def test_refuses_other_text(self, text: str) -> None:
        with pytest.raises(ValueError, match="not the JSON of a `History`"):
            History.from_json(text)

    @pytest.mark.parametrize(
        ("part", "name", "value"),
        [
            ("records", "kind", '"><meta http-equiv="refresh" content="0;url=https://example.com">'),
            ("records", "kind", ["train"]),
            ("records", "epoch", "1"),
            ("records", "seconds", True),
            ("records", "metrics", [0.5]),
            ("events", "kind", "<script>"),
            ("events", "new_size", 2.5),
            ("events", "cause", None),
        ],
    )
    def test_refuses_values_of_other_types(self, part: str, name: str, value: Any) -> None:
        history = history_of(record("train", 1, loss=0.5))
        history.events.append(GroupEvent("continued", 4, 3, 0.5, "rank 2 died", at=12.5))
        content = json.loads(history.to_json())
        content[part][0][name] = value
        with pytest.raises(ValueError, match=f"not the JSON of a `History`.*{name}"):
            History.from_json(json.dumps(content))


def test_what_has_no_place_in_json_becomes_text() -> None:
    assert plain({1: [None, True, 2, "x"], "big": np.zeros(2000)})["1"] == [None, True, 2, "x"]
    assert isinstance(plain(np.zeros(2000)), str)


def test_numbers_that_are_not_in_json_become_floats_or_text() -> None:
    values = [1j, Decimal("0.5"), Fraction(1, 4), np.longdouble(0.5), np.complex64(1j), np.datetime64("2026")]
    assert json.loads(json.dumps(plain(values))) == ["1j", 0.5, 0.25, 0.5, "1j", "2026-01-01"]


def test_rows_become_a_data_frame() -> None:
    frame = history_of(record("train", 1, loss=1.0), record("train", 2, loss=0.5)).to_pandas()
    assert frame["loss"].tolist() == [1.0, 0.5]
    assert frame["epoch"].tolist() == [1, 2]


class TestAnotherHistory:
    def test_goes_ahead_of_this_one(self) -> None:
        before, after = history_of(record("train", 1, a=1)), history_of(record("train", 2, a=2))
        after.take_over(before)
        assert after["a"] == [1, 2]
        assert len(after.records) == 2
        after[0]["a"] = 5
        assert before["a"] == [1]


class TestALongHistory:
    def long(self, epochs: int) -> History:
        return history_of(*(record(kind, n, a=n) for n in range(epochs) for kind in get_args(Kind)[:2]))

    def test_forgets_the_oldest_epochs_now_and_then(self) -> None:
        history = self.long(100)
        history.forget_old(80)
        assert (len(history), len(history.records)) == (100, 80)  # of 200 calls, and there are a quarter more rows
        history.add(record("train", 100, a=100))
        history.forget_old(80)
        assert (history["epoch"], history.records[-1].epoch) == ([*range(21, 101)], 100)
        assert history.extent == (101, 201, 0)

    def test_has_the_same_parts_whatever_was_forgotten(self) -> None:
        history, whole = self.long(100), self.long(100)
        history.forget_old(20)
        for each in (history, whole):
            before = each.extent
            each.add(record("train", 100, a=100))
            each.events.append(GroupEvent("continued", 4, 4, 0.5, "rank 2 died"))
            part = each.part(before, each.extent)
            assert (part["a"], len(part.records), len(part.events)) == ([100], 1, 1)

    def test_can_be_thinned(self) -> None:
        thin = self.long(100).thinned(10)
        assert thin["epoch"] == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
        assert [each.epoch for each in thin.records if each.kind == "validation"] == thin["epoch"]


def make_history(num_epochs: int = 3) -> History:
    history = History()
    for epoch in range(1, num_epochs + 1):
        train = {"num_samples": 10, "train_loss": 1 / epoch, "last_train_loss": 9.0, "lr": 0.1}
        history.add(CallRecord("train", epoch, train, 10.0 * epoch, 2.5, 2))
        history.add(CallRecord("validation", epoch, {"accuracy": 0.5}, 10.0 * epoch + 5, 1.0, 2))
    return history


def test_a_line_has_the_last_metrics() -> None:
    history = make_history()
    history.events.append(GroupEvent("restored", 2, 2, 1.0, "rank 1 was lost", at=15.0))
    history.stop_reason = "good enough"
    assert repr(history) == (
        "<History: 3 epochs, 1 failure of workers, stopped: good enough; "
        "last: train_loss=0.3333, lr=0.1, val_accuracy=0.5>"
    )
    assert repr(History()) == "<History: 0 epochs>"


def test_the_text_is_a_table_with_what_happened() -> None:
    history = make_history()
    history.events.append(GroupEvent("started", 0, 2, 1.0, "the trainer was created", at=1.0))
    history.events.append(GroupEvent("restored", 2, 2, 1.0, "rank 1 was lost", at=15.0))
    history.stop_reason = "good enough"
    lines = str(history).splitlines()
    assert lines[:2] == [
        "epoch  train_loss      lr  val_accuracy   time",
        "    1       1.000  0.1000        0.5000  2.5 s",
    ]
    assert "rank 1 was lost" in lines[4]
    assert lines[6:] == ["stopped: good enough"]
    assert str(History()) == "no epochs"


def test_a_long_history_shows_its_end() -> None:
    lines = str(make_history(50)).splitlines()
    assert lines[1] == "(30 more)"
    assert lines[-1].split()[0] == "50"
    assert "the last 20 are shown" in make_history(50)._repr_html_()


def test_the_card_escapes_what_comes_from_outside() -> None:
    history = History([GroupEvent("restored", 2, 2, 1.0, HOSTILE, at=15.0)])
    for epoch in (1, 2):
        history.add(CallRecord("train", epoch, {HOSTILE: 0.5}, 10.0, 1.0, 2))
    history.stop_reason = HOSTILE
    card = history._repr_html_()
    assert "<script>" not in card
    assert card.count("&lt;script&gt;") == 3


def test_any_values_have_a_card() -> None:
    nan, inf = math.nan, math.inf
    odd = [(nan, nan), (inf, -inf), (0, 0.0), (1e300, -1e300), (10**400, 2), (True, None), (np.float32(1), 2)]
    history = History()
    for epoch in (1, 2):
        row = {f"val_{number}": values[epoch - 1] for number, values in enumerate(odd)}
        history.add(CallRecord("train", epoch, row, 100.0 + epoch, 0.0, 1))
    assert "-1.000e+300" in history._repr_html_()
    assert "0 epochs" in History()._repr_html_()


@pytest.mark.parametrize(("columns", "names"), [(120, 4), (60, 4), (45, 3)])
def test_the_text_fits_the_terminal(columns: int, names: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    history = History([GroupEvent("restored", 2, 2, 1.0, "rank 1 was lost", "from the last snapshot", at=15.0)])
    metrics = {
        "grad_norm": 1.0,
        "train_loss": 0.5,
        "lr": 0.1,
        "val_loss": 0.25,
        "val_acc": 0.75,
        "time_lost": 2.0,
    }
    history.add(CallRecord("train", 1, metrics, 10.0, 2.5, 2))
    history.stop_reason = "because of " + 10 * "very " + "good reasons"
    lines = str(history).splitlines()
    assert max(map(len, lines)) <= columns
    shown = [name for name in metrics if name in lines[0]]
    assert (len(shown), "val_loss" in shown) == (names, True)
    assert lines[2].startswith("also measured: ")
    assert "".join(lines).count("very") == 10


def test_a_call_that_a_former_process_began_has_the_time_that_its_ranks_tell_and_the_next_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("raysgd.core.history.history.time", SimpleNamespace(time=lambda: now, perf_counter=lambda: now))
    recorder = CallRecorder([])
    recorder.told_s = lambda: 9.0
    calls: list[tuple[Kind, float, float]] = [("validation", 99, 100), ("train", 100, 102), ("train", 110, 112)]
    for kind, now, ended in calls:
        end = recorder.begin(kind)
        now = ended
        assert end({}, 2) == {}
    assert [(each.began_at, each.seconds) for each in recorder.history.records] == [(99, 1), (93, 9), (110, 2)]
