"""`ProgressBar`: a callback that shows the progress of a run, and one line of results for each epoch.

The driver draws the progress that workers report. On a terminal or in a notebook, it draws a bar for each call, such as
`train`, and removes the bar when the call finishes. A log file gets only lines of text, because a bar would fill pages.
Guarantees:

* While a bar is shown, other printed and logged lines appear above the bar.
* The lines of results stay.
* If the terminal closes, or the output cannot be written, training continues. Only the drawing stops.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from raysgd.callbacks.callback import Callback, Run
from raysgd.core.arguments import is_number
from raysgd.core.history import readable
from raysgd.core.imports import require
from raysgd.core.text import cards
from raysgd.core.text.log_lines import Once, printable

if TYPE_CHECKING:
    from raysgd.core.engine.shared.interface import GroupEvent
    from raysgd.core.numbers.results import CallProgress


logger = logging.getLogger(__name__)

_PHASES = {"train": "train", "validation": "validate", "test": "test", "predict": "predict"}
_MOST_VALUES = 3
_MOST_IN_ROW = 4
_QUIET_S = 60.0
_BAR = "{desc}{n_fmt}/{total_fmt} |{bar}| [<{remaining}, {rate_fmt}{postfix}]"
_BAR_WITHOUT_END = "{desc}{n_fmt} [{elapsed}, {rate_fmt}{postfix}]"
_SHORTEST_BAR = 5
_WIDTH_OF_NUMBERS = 6
_RATE = "throughput"
_SPEAK_FOR_THEMSELVES = ("time", _RATE, "workers")


class ProgressBar(Callback):
    """Shows a run's progress: a bar for each call to `train`, `validate` and `predict`, and a line for each epoch.

    Args:
        metrics: Names of the metrics to show. None shows the four most informative metrics in each line, and the first
            three metrics of the current batch in the bar. On a narrow terminal, the throughput is dropped first, then
            metrics.
        stream: Stream to write to. Default: standard error.

    Examples:
        >>> trainer.fit(10, callbacks=[ProgressBar(metrics=("train_loss", "val_loss"))])  # doctest: +SKIP
    """

    def __init__(self, metrics: Sequence[str] | None = None, stream: Any = None) -> None:
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics or ()):
            raise TypeError(f"`metrics={metrics!r}`: need a list of names, such as `metrics=['train_loss']`.")
        self._metrics = None if metrics is None else tuple(metrics)
        self._stream, self._drawn = stream, cast("LineBar | None", None)
        self._once = Once()
        self._num_workers: int | None = None
        self._began = time.monotonic()

    def on_run_begin(self, run: Run) -> None:
        self._drawn, self._num_workers, self._began = None, None, time.monotonic()

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        self._show(progress, self._label(run))

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        for name in self._metrics or ():
            if name not in result and self._once.is_first(name):
                logger.warning("`ProgressBar`: %s", readable.unknown(name, readable.metrics_of([result])))
        self._show_row(self._label(run), result, self._circumstances(result))

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        self._show_row(f"step {step}", metrics, {})

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self._num_workers = event.old_size

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._bar.clear()
        if error is None and run.epoch:
            took = readable.seconds(time.monotonic() - self._began)
            reason = run.history.stop_reason
            self._bar.line(f"stopped after {took}: {reason}" if reason else f"finished in {took}")
            for left in (each.left_behind(run) for each in run.callbacks):
                if left is not None:
                    self._bar.line(left)

    @contextlib.contextmanager
    def around(self, trainer: Any) -> Iterator[ProgressBar]:
        """Show the progress of `train`, `validate`, `test` and `predict` calls inside the `with` block.

        Args:
            trainer: A `TorchTrainer` or `TFTrainer`.

        Examples:
            >>> with ProgressBar().around(trainer):  # doctest: +SKIP
            ...     scores = trainer.predict(rows)
        """
        began: list[float] = []

        def show(progress: CallProgress) -> None:
            began.append(time.monotonic())
            self._show(progress, _label_of_call(progress))
            if progress.is_done:
                self._bar.line(self._line_of_call(progress, time.monotonic() - began[0]))
                began.clear()

        with trainer._life.listeners.listening(show):
            try:
                yield self
            finally:
                self._bar.clear()

    def _show(self, progress: CallProgress, label: str) -> None:
        """Draw the progress of a call, or remove the bar if the call has finished."""
        if progress.is_done:
            self._bar.clear()
            return
        values = self._values(progress)
        self._bar.draw(f"{label} {_PHASES[progress.kind]}".strip(), progress.num_steps, progress.total, values)

    def _show_row(self, label: str, row: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        """Write a line of results: all metrics that the user named, or else the most informative ones."""
        self._bar.clear()
        most = _MOST_IN_ROW if self._metrics is None else None
        self._bar.row(label, readable.chosen(row, self._metrics), texts, most)

    def _values(self, progress: CallProgress) -> dict[str, str]:
        metrics = readable.chosen(progress.metrics, self._metrics)
        return _as_text(dict([*metrics.items()][: _MOST_VALUES if self._metrics is None else None]))

    def _line_of_call(self, progress: CallProgress, took: float) -> str:
        what = f"{_label_of_call(progress)} {_PHASES[progress.kind]}".strip()
        values = [f"{name} {value}" for name, value in self._values(progress).items()]
        count = readable.counted(progress.num_steps, "batch", "batches")
        return "  ".join([what, count, *values, readable.seconds(took)])

    @property
    def _bar(self) -> LineBar:
        """The object that draws the bar.

        It is created on first use, because the program may redirect its output streams before then.
        """
        if self._drawn is None:
            self._drawn = make_bar(self._stream or sys.stderr)
        return self._drawn

    def _label(self, run: Run) -> str:
        unit = "epoch" if run.trainer is not None else "report"
        width = len(str(run.epochs)) if run.epochs is not None else 0
        of = f"/{run.epochs}" if run.epochs is not None else ""
        return f"{unit} {run.epoch:>{width}}{of}"

    def _circumstances(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the values to show besides the metrics of an epoch, as text.

        These are the time, the throughput, and the number of workers if it has changed.
        """
        texts = {}
        if is_number(result.get("seconds")):
            texts["time"] = readable.seconds(result["seconds"])
        speed = readable.samples_per_s(result)
        if speed is not None:
            texts[_RATE] = readable.rate(speed)
        num_workers = result.get("num_workers")
        if num_workers is not None and self._num_workers not in (None, num_workers):
            texts["workers"] = readable.counted(num_workers, "worker")
        self._num_workers = num_workers
        return texts


def _as_text(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the names and values of metrics as printable text. A name might contain control codes of terminals."""
    return {printable(name): printable(readable.number(value)) for name, value in metrics.items()}


def _label_of_call(progress: CallProgress) -> str:
    if progress.kind in ("predict", "test"):
        return ""
    of = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"epoch {progress.epoch_idx + 1}{of}"


class LineBar:
    """Writes progress as lines of text in aligned columns, without a bar. A long call gets a line every minute.

    Args:
        stream: Stream to write to: a log file, or a terminal if tqdm is not installed.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._widths: dict[str, int] = {}
        self._last_line = time.monotonic()

    def draw(self, title: str, done: int, total: int | None, values: Mapping[str, str]) -> None:
        """Show the current progress of a call.

        Args:
            title: Title of the call, such as "epoch 3/10 train".
            done: Number of batches so far.
            total: Total number of batches, or None if unknown.
            values: Formatted metrics by name.
        """
        if time.monotonic() - self._last_line >= _QUIET_S:
            of = f"/{total}" if total is not None else ""
            texts = "  ".join(f"{name} {value}" for name, value in values.items())
            self.line(f"{title} {done}{of} batches  {texts}".rstrip())

    def clear(self) -> None:
        """Remove the bar. This class has no bar, so this method does nothing unless a subclass overrides it."""

    def row(self, label: str, metrics: Mapping[str, Any], texts: Mapping[str, str], most: int | None) -> None:
        """Write a line of results, which stays visible.

        Args:
            label: Label of the line, such as "epoch 3/10".
            metrics: Metrics to show. If there are more than `most`, or if they do not fit in the terminal, only the
                most informative metrics are shown.
            texts: Other values to show, as text. On a narrow terminal, the throughput is left out first.
            most: Maximum number of metrics to show. None to show all, even if the line is too long for the terminal.
        """
        width = cards.width() if is_terminal(self._stream) else math.inf
        without_rate = {name: value for name, value in texts.items() if name != _RATE}
        text = self._in_columns(label, {**_as_text(metrics), **texts}) if most is None else ""
        for number in range(most or 0, 0, -1):
            shown = _as_text({name: metrics[name] for name in readable.most_telling(metrics, number)})
            text = self._in_columns(label, {**shown, **texts})
            if len(text) > width:
                text = self._in_columns(label, {**shown, **without_rate})
            if len(text) <= width:
                break
        self.line(text)

    def line(self, text: str) -> None:
        """Write a line of text, which stays visible."""
        self._last_line = time.monotonic()
        with _while_there_is_a_reader():
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def _in_columns(self, label: str, values: Mapping[str, str]) -> str:
        """Format a line of results with columns as wide as in earlier lines."""
        # The names in `_SPEAK_FOR_THEMSELVES` are left out, because the unit makes clear what the value is.
        names = {name: "" if name in _SPEAK_FOR_THEMSELVES else f"{name} " for name in values}
        cells = [names[name] + self._padded(name, value) for name, value in values.items()]
        return "  ".join([self._padded("", label), *cells]).rstrip()

    def _padded(self, name: str, value: str) -> str:
        least = 0 if not name or name in _SPEAK_FOR_THEMSELVES else _WIDTH_OF_NUMBERS
        width = self._widths[name] = max(self._widths.get(name, least), len(value))
        return value.ljust(width)


class TqdmBar(LineBar):
    """Draws a tqdm bar, which disappears when the call finishes.

    In notebooks, the bar is a widget if ipywidgets is installed.

    Args:
        stream: Stream to write to: a terminal, or the output of a notebook.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._tqdm = require("tqdm.auto", extra="progress").tqdm
        self._bar: Any = None
        self._redirected = contextlib.ExitStack()

    def draw(self, title: str, done: int, total: int | None, values: Mapping[str, str]) -> None:
        with _while_there_is_a_reader():
            if self._bar is None:
                options = {"unit": "batch", "leave": False, "dynamic_ncols": True, "delay": 1e-9}
                self._bar = self._tqdm(initial=done, total=total, file=self._stream, **options)
                self._redirected.enter_context(lines_above(self._stream))
            self._bar.set_description(title, refresh=False)
            self._bar.total, self._bar.n = total, done
            whole = _BAR_WITHOUT_END if total is None else _BAR
            for number, rate in product(range(len(values), -1, -1), (", {rate_fmt}", "")):
                shown = {name: values[name] for name in readable.most_telling(values, number)}
                self._bar.bar_format = whole.replace(", {rate_fmt}", rate)
                self._bar.set_postfix(shown, refresh=False)
                if self._fits():
                    break
            self._bar.refresh()

    def clear(self) -> None:
        bar, self._bar = self._bar, None
        self._redirected.close()
        if bar is not None:
            with _while_there_is_a_reader():
                bar.close()

    def _fits(self) -> bool:
        """Return True if the line fits in the terminal, at least with a short bar. Otherwise, tqdm would cut it off."""
        facts = self._bar.format_dict
        shortest = facts["bar_format"].replace("{bar}", "#" * _SHORTEST_BAR)
        line = self._bar.format_meter(**{**facts, "ncols": None, "bar_format": shortest})
        return facts["ncols"] is None or len(line) <= facts["ncols"]


def make_bar(stream: Any) -> LineBar:
    """Return a `TqdmBar` for an output stream that can show a bar, if tqdm is installed.

    Otherwise, return a `LineBar`.
    """
    if is_watched(stream):
        with contextlib.suppress(ImportError):
            return TqdmBar(stream)
    return LineBar(stream)


def is_watched(stream: Any) -> bool:
    """Return True if an output stream can show a bar: a terminal that can redraw lines, or any stream in a notebook."""
    return is_notebook() or is_terminal(stream)


def is_notebook() -> bool:
    """Return True if this program runs in the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def is_terminal(stream: Any) -> bool:
    """Return True if an output stream is a terminal that can redraw lines."""
    is_one = bool(getattr(stream, "isatty", lambda: False)())
    return is_one and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextlib.contextmanager
def _while_there_is_a_reader() -> Iterator[None]:
    """Inside the block, ignore errors from writing to a closed terminal or log file, so that training continues."""
    try:
        yield
    except (OSError, ValueError) as error:  # writing to a closed stream raises a `ValueError`
        logger.debug("the progress cannot be shown: %s", error)


@contextlib.contextmanager
def lines_above(stream: Any) -> Iterator[None]:
    """Inside the block, lines that are printed or logged appear above the tqdm bar.

    Args:
        stream: The stream on which the bar is drawn.
    """
    wrapper = require("tqdm.contrib", extra="progress").DummyTqdmFile
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [handler for each in loggers for handler in getattr(each, "handlers", ())]
    with contextlib.ExitStack() as stack:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            before = getattr(sys, name)
            if before is stream or (before is not None and before.isatty()):
                above = wrapper(stream)
                stack.enter_context(redirect(above))
                for handler in dict.fromkeys(handlers):  # log handlers keep the stream with which they were created
                    if type(handler) is not logging.StreamHandler or handler.stream is not before:
                        continue
                    stack.callback(handler.setStream, before)
                    handler.setStream(above)
        yield
