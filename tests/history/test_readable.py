"""A history as a line, as text, and as a card.

Covers `raysgd.history.readable`, which makes them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from raysgd.engine.shared.group_events import GroupEvent
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
    assert lines[6:] == ["stopped: good enough"]
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
    assert card.count("&lt;script&gt;") == 3


def test_an_empty_history_has_a_card() -> None:
    assert "0 epochs" in History()._repr_html_()


def test_any_values_have_a_card() -> None:
    nan, inf = math.nan, math.inf
    odd = [(nan, nan), (inf, -inf), (0, 0.0), (1e300, -1e300), (10**400, 2), (True, None), (np.float32(1), 2)]
    history = History()
    for epoch in (1, 2):
        row = {f"val_{number}": values[epoch - 1] for number, values in enumerate(odd)}
        history.add(CallRecord("train", epoch, row, 100.0 + epoch, 0.0, 1))
    assert "-1.000e+300" in history._repr_html_()


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
