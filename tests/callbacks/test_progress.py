"""The progress bar, on terminals, in log files and in notebooks; and what is printed while it is drawn.

Covers `raysgd.callbacks.progress`, which draws it.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import struct
import sys
import termios
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.callbacks import ProgressBar, Run
from raysgd.callbacks import progress as progress_module
from raysgd.callbacks.progress import LineBar, TqdmBar, make_bar
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.numbers.results import CallProgress
from raysgd.trainer.driver.listeners import ProgressListeners


class Terminal(io.StringIO):
    """Claims to be one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def make_run(epochs: int | None = 10, trainer: Any = object) -> Run:
    run = Run(name="run", trainer=trainer, epochs=epochs)
    run.epoch = 3
    return run


def bar_on(stream: io.StringIO) -> tuple[ProgressBar, io.StringIO, Run]:
    return ProgressBar(stream=stream), stream, make_run()


def news(done: int, kind: Any = "train", **metrics: float) -> CallProgress:
    return CallProgress(done, 10, 2, 10, None, kind, metrics or {"train_loss": 0.5})


ROW = {
    "epoch": 3,
    "num_samples": 3000,
    "train_loss": 0.25,
    "last_train_loss": 0.2,
    "val_loss": 0.5,
    "seconds": 2.0,
    "num_workers": 4,
}


def screen(text: str) -> list[str]:
    """What is to be read on a terminal in the end, from what was written to it."""
    pyte_free = [""]
    row = column = 0
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\x1b":
            end = index + 2
            while not text[end].isalpha():
                end += 1
            code, number = text[end], text[index + 2 : end]
            if code == "A":
                row = max(0, row - int(number or 1))
            elif code == "K":
                pyte_free[row] = "" if number == "2" else pyte_free[row][:column]
            index = end + 1
            continue
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            pyte_free += [""] * (row + 1 - len(pyte_free))
        else:
            line = pyte_free[row].ljust(column)
            pyte_free[row] = line[:column] + character + line[column + 1 :]
            column += 1
        index += 1
    return [line.rstrip() for line in pyte_free if line.strip()]


def test_a_terminal_shows_a_bar_while_a_call_runs_and_a_line_of_results_after_it() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_run_begin(run)
    bar.on_progress(run, news(4))
    [drawn] = screen(stream.getvalue())
    assert drawn.startswith("epoch  3/10 train")
    assert "4/10" in drawn
    assert "train_loss" in drawn
    bar.on_progress(run, news(2, "validation", val_loss=0.75))
    [drawn] = screen(stream.getvalue())
    assert drawn.startswith("epoch  3/10 validate")
    assert "0.7500" in drawn
    bar.on_result(run, dict(ROW))
    bar.on_run_end(run, None)
    row, end = screen(stream.getvalue())
    assert row == "epoch  3/10  train_loss 0.2500  val_loss 0.5000  2.0 s  1.5k samples/s"
    assert end.startswith("finished in ")


def test_a_call_that_is_done_takes_its_bar_away() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_progress(run, news(4))
    bar.on_progress(run, CallProgress(10, 10, 2, 10, None, is_done=True))
    assert screen(stream.getvalue()) == []


def test_prints_and_log_lines_go_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a handler that keeps the stream it was made with, and half lines of a print."""
    stream, run = Terminal(), make_run()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    handler, logger = logging.StreamHandler(stream), logging.getLogger("tests.of_the_bar")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(handler)
    try:
        bar = ProgressBar()
        bar.on_progress(run, news(4))
        print("half a line, ", end="")
        print("and the rest")
        logger.warning("rank 1 was lost")
        bar.on_progress(run, news(5))
        first, second, drawn = screen(stream.getvalue())
        assert (first, second) == ("half a line, and the rest", "rank 1 was lost")
        assert "5/10" in drawn
        bar.on_run_end(run, KeyError("user code"))
        assert screen(stream.getvalue()) == [first, second]
        assert (sys.stderr, sys.stdout, handler.stream) == (stream, stream, stream)
        logger.warning("later")
        assert screen(stream.getvalue())[-1] == "later"
    finally:
        logger.removeHandler(handler)


def test_what_keeps_the_stream_of_a_bar_can_write_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, run = Terminal(), make_run()
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar()
    bar.on_progress(run, news(4))
    kept = sys.stderr
    assert kept is not stream
    assert kept.isatty()
    bar.on_run_end(run, KeyError())
    print("still here", file=kept)
    assert screen(stream.getvalue()) == ["still here"]


def test_output_that_goes_to_a_file_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, file, run = Terminal(), io.StringIO(), make_run()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", file)
    bar = ProgressBar()
    bar.on_progress(run, news(4))
    print("a line")
    bar.on_run_end(run, KeyError())
    assert file.getvalue() == "a line\n"


def test_a_log_file_gets_lines_in_columns_and_nothing_else() -> None:
    bar, stream, run = bar_on(io.StringIO())
    bar.on_run_begin(run)
    for loss in (12.5, 0.125):
        for done in range(10):
            bar.on_progress(run, news(done))
        bar.on_result(run, {**ROW, "train_loss": loss})
    bar.on_run_end(run, None)
    first, second, _ = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert first.index("val_loss") == second.index("val_loss")


def test_a_long_call_is_not_silent_in_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    bar, stream, run = bar_on(io.StringIO())
    for second in range(0, 200, 5):
        now[0] = float(second)
        bar.on_progress(run, news(second // 20))
    assert stream.getvalue().splitlines() == [
        f"epoch  3/10 train {done}/10 batches  train_loss 0.5000" for done in (3, 6, 9)
    ]


def test_a_terminal_gets_a_bar_if_it_can_move_its_cursor_and_tqdm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_bar(Terminal())) is TqdmBar
    with monkeypatch.context() as dumb:
        dumb.setenv("TERM", "dumb")
        assert type(make_bar(Terminal())) is LineBar
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert type(make_bar(Terminal())) is LineBar


@pytest.mark.parametrize(("metrics", "words"), [("val_loss", "metrics='val_loss'.*list"), ([1], r"metrics=\[1\]")])
def test_wrong_arguments_are_refused(metrics: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ProgressBar(metrics=metrics)


def test_chosen_metrics_are_shown_in_their_order_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    stream, run = io.StringIO(), make_run()
    bar = ProgressBar(metrics=("val_loss", "last_train_loss", "val_los"), stream=stream)
    for _ in range(2):
        bar.on_result(run, {**ROW})
    assert stream.getvalue().startswith("epoch  3/10  val_loss 0.5000  last_train_loss 0.2000  2.0 s")
    assert [record.getMessage() for record in caplog.records] == [
        "`ProgressBar`: there is no metric `val_los`. Did you mean `val_loss`?"
    ]


def test_a_row_tells_of_another_number_of_workers() -> None:
    bar, stream, run = bar_on(io.StringIO())
    bar.on_result(run, dict(ROW))
    bar.on_event(run, GroupEvent("continued", 4, 3, 0.5, "rank 1 was lost"))
    bar.on_result(run, {**ROW, "num_workers": 3})
    bar.on_result(run, {**ROW, "num_workers": 3})
    assert ["3 workers" in line for line in stream.getvalue().splitlines()] == [False, True, False]


def test_a_function_has_reports_instead_of_epochs() -> None:
    stream, run = io.StringIO(), make_run(epochs=None, trainer=None)
    bar = ProgressBar(stream=stream)
    bar.on_result(run, {"loss": 0.5, "name": "text"})
    run.history.stop_reason = "good enough"
    bar.on_run_end(run, None)
    first, last = stream.getvalue().splitlines()
    assert first == "report 3  loss 0.5000"
    assert last.endswith(": good enough")


def test_a_closed_terminal_does_not_end_the_training() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_progress(run, news(1))
    stream.close()
    bar.on_progress(run, news(2))
    bar.on_result(run, dict(ROW))
    bar.on_run_end(run, None)


@pytest.fixture
def listeners() -> ProgressListeners:
    """Those of a trainer; a real one is watched in the last story."""
    return ProgressListeners(cast("Any", SimpleNamespace(turns=SimpleNamespace(closed=nullcontext))))


def test_each_call_by_hand_leaves_a_line(listeners: ProgressListeners) -> None:
    stream = Terminal()
    with ProgressBar(stream=stream).around(SimpleNamespace(_life=SimpleNamespace(listeners=listeners))):
        listeners.tell(CallProgress(3, 9, 1, 4, 0.5, "train", {"train_loss": 0.5}))
        listeners.tell(CallProgress(9, 9, 1, 4, 0.5, "train", {"train_loss": 0.25}, is_done=True))
        listeners.tell(CallProgress(500, 1000, 0, None, None, "predict"))
        listeners.tell(CallProgress(1000, 1000, 0, None, None, "predict", is_done=True))
    listeners.tell(CallProgress(3, 9, 1, 4, 0.5, "train"))
    train, predict = screen(stream.getvalue())
    assert train.startswith("epoch 2/4 train  9 batches  train_loss 0.2500  ")
    assert predict.startswith("predict  1000 batches  ")


def test_a_call_by_hand_that_raises_leaves_nothing(listeners: ProgressListeners) -> None:
    stream = Terminal()

    def fail() -> None:
        with ProgressBar(stream=stream).around(SimpleNamespace(_life=SimpleNamespace(listeners=listeners))):
            listeners.tell(CallProgress(3, 9, 1, 4, 0.5))
            assert "3/9" in screen(stream.getvalue())[0]
            raise KeyError("user code")

    with pytest.raises(KeyError, match="user code"):
        fail()
    assert screen(stream.getvalue()) == []


def test_hostile_names_are_text() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_progress(run, news(1, **{"[bold]x[/nothing]": 0.5}))
    bar.on_result(run, {"[/red]{task}\x1b[2J\n": 1.5})
    assert screen(stream.getvalue()) == ["epoch  3/10  [/red]{task}\\x1b[2J\\n 1.500"]


def test_the_rate_of_tqdm_does_not_count_what_was_done_before_it_was_drawn() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_progress(run, CallProgress(600_000, 1_000_000, 2, 10, None))
    [drawn] = screen(stream.getvalue())
    assert "600000/1000000" in drawn
    assert "?batch/s" in drawn
    bar.on_run_end(run, None)


def test_a_bar_of_unknown_length_does_not_say_when_it_ends() -> None:
    bar, stream, run = bar_on(Terminal())
    bar.on_progress(run, CallProgress(6, None, 2, 10, None, "train", {"train_loss": 0.5}))
    [drawn] = screen(stream.getvalue())
    bar.on_run_end(run, None)
    assert drawn == "epoch  3/10 train: 6 [00:00, ?batch/s, train_loss=0.5000]"


@pytest.mark.integration
def test_a_real_notebook_shows_rows_and_no_bar_in_the_end() -> None:
    """Also without ipywidgets, with which the bar is a widget."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    code = """
        from raysgd.callbacks import ProgressBar, Run
        from raysgd.core.numbers.results import CallProgress

        run, bar = Run(name="run", trainer=object, epochs=2), ProgressBar()
        for run.epoch in (1, 2):
            bar.on_progress(run, CallProgress(3, 10, run.epoch, 2, 0.5))
            print("a line of the user")
            bar.on_result(run, {"train_loss": 0.5 / run.epoch})
        bar.on_run_end(run, None)
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code))])
    nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240).execute()
    streams: dict[str, str] = {}
    for output in notebook.cells[0].outputs:
        assert output["output_type"] == "stream"
        streams[output["name"]] = streams.get(output["name"], "") + output["text"]
    assert streams["stdout"].splitlines() == ["a line of the user"] * 2
    assert "3/10" in streams["stderr"], "a bar was drawn"
    first, second, end = screen(streams["stderr"])[-3:]
    assert (first, second) == ("epoch 1/2  train_loss 0.5000", "epoch 2/2  train_loss 0.2500")
    assert end.startswith("finished in ")


@pytest.mark.parametrize(
    ("stream", "columns", "shown"),
    [
        (Terminal(), 80, ["train_loss", "val_loss", "val_accuracy"]),
        (Terminal(), 120, ["train_loss", "grad_norm", "val_loss", "val_accuracy"]),
        (io.StringIO(), 80, ["train_loss", "grad_norm", "val_loss", "val_accuracy"]),
    ],
)
def test_a_line_of_results_has_at_most_four_metrics_and_fits_the_terminal(
    stream: io.StringIO, columns: int, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    bar, run = ProgressBar(stream=stream), make_run()
    bar.on_result(run, {**ROW, "grad_norm": 0.5, "lr": 0.1, "val_accuracy": 0.75, "odd": 1.0})
    [line] = stream.getvalue().splitlines()
    assert [
        name for name in ("train_loss", "grad_norm", "lr", "val_loss", "val_accuracy", "odd") if name in line
    ] == shown
    assert len(line) <= columns or type(stream) is io.StringIO
    assert ("samples/s" in line) == (columns > 80 or type(stream) is io.StringIO), "left out before a metric is"


def test_a_validation_inside_an_epoch_shows_all_metrics_that_were_named() -> None:
    names, stream = [f"metric_{number}" for number in range(5)], io.StringIO()
    for metrics in (names, None):
        ProgressBar(metrics, stream=stream).on_validation(make_run(), 3, dict.fromkeys(names, 0.5))
    named, unnamed = stream.getvalue().splitlines()
    assert [name for name in names if name in named] == names
    assert len([name for name in names if name in unnamed]) == 4


@pytest.mark.parametrize(
    ("columns", "shown", "has_rate"),
    [
        (40, [], False),
        (60, ["val_loss"], False),
        (80, ["grad_norm", "val_loss"], False),
        (90, ["lr", "grad_norm", "val_loss"], False),
        (120, ["lr", "grad_norm", "val_loss"], True),
    ],
)
def test_a_bar_shows_the_metrics_that_fit_the_terminal_before_a_rate_and_cuts_none(
    columns: int, shown: list[str], has_rate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    stream, run = Terminal(), make_run()
    monkeypatch.setattr(stream, "fileno", lambda: terminal)
    bar = ProgressBar(stream=stream)
    bar.on_progress(run, news(4, lr=0.1, grad_norm=0.5, val_loss=0.25))
    [drawn] = screen(stream.getvalue())
    bar.on_run_end(run, None)
    os.close(controller)
    os.close(terminal)
    assert len(drawn) < columns
    assert drawn.endswith("]")
    assert [name for name in ("lr", "grad_norm", "val_loss") if f"{name}=" in drawn] == shown
    assert ("batch/s" in drawn) == has_rate
