"""A history as a line, as text, as a card, and as a picture; and charts.

Covers `raysgd.history.charts`, which draws the lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history.charts import Series, line_chart, nice_ticks, time_ticks, whole_ticks
from raysgd.history.history import CallRecord, History

HOSTILE = "<script>$x^{$"


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
    assert lines[5:] == ["stopped: good enough"]
    assert str(History()) == "no epochs"


def test_a_stored_history_has_the_same_text() -> None:
    history = make_history()
    assert str(History.from_json(history.to_json())) == str(history)


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
    assert card.count("&lt;script&gt;") >= 4
    assert "<polyline" in card


def test_an_empty_history_has_a_card() -> None:
    assert "0 epochs" in History()._repr_html_()


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_plot_is_a_file_of_the_kind_that_its_name_says(ending: str, tmp_path: Path) -> None:
    make_history().plot(tmp_path / f"curves{ending}")
    begin = (tmp_path / f"curves{ending}").read_bytes()[:5]
    assert begin.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending])


def test_a_plot_has_the_chosen_metrics_with_their_names_as_text(tmp_path: Path) -> None:
    import matplotlib

    history = make_history()
    history.add_row({"epoch": 4, "train_$x^{$": 0.5, "train_loss": float("nan")})
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        history.plot(str(tmp_path / "all.svg"))
        history.plot(tmp_path / "one.svg", metrics=["val_accuracy"])
    everything, one = ((tmp_path / name).read_text() for name in ("all.svg", "one.svg"))
    assert "train_loss" in everything
    assert "$x^{$" in everything
    assert "val_accuracy" in one
    assert "train_loss" not in one


def test_a_plot_says_what_it_cannot_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match=r"`val_accurcy`\. Did you mean `val_accuracy`"):
        make_history().plot(tmp_path / "x.png", metrics=["val_accurcy"])
    with pytest.raises(ValueError, match="train for an epoch"):
        History().plot(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"History.plot.*pip install .*matplotlib>="):
        make_history().plot(tmp_path / "x.png")


def test_a_gap_in_the_numbers_is_a_gap_in_the_line() -> None:
    chart = line_chart([Series("x", [(1, 1.0), (2, 2.0), (3, float("nan")), (4, 1.0), (5, 2.0)])])
    assert chart.count("<polyline") == 2
    assert chart.count("<circle") == 4
    assert "no finite values" in line_chart([Series("x", [(1, float("nan"))])])


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-5, 7), (0.001, 0.0011), (3, 3), (0, 0), (-1e9, 1e12), (1e-12, 2e-12)]
)
def test_ticks_enclose_the_values_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize("end", [0.001, 0.5, 3, 59, 100, 4000, 90_000, 5e6])
def test_ticks_of_time_are_few_and_inside(end: float) -> None:
    ticks = time_ticks(end)
    assert 1 < len(ticks) <= 12
    assert ticks[0] == 0
    assert ticks[-1] <= end


@pytest.mark.parametrize("last", [1, 2, 7, 30, 999, 12345])
def test_ticks_of_epochs_are_whole(last: int) -> None:
    ticks = whole_ticks(1, last)
    assert 1 <= len(ticks) <= 10
    assert all(tick == int(tick) for tick in ticks)
