"""Ways to draw how far a call is: with rich, with tqdm, in a notebook, or as lines in a log file.

What it guarantees:

* While a bar is drawn, everything else that is printed or logged goes above it, in separate lines.
* A bar that is cleared leaves nothing behind. Lines that were written stay.
* Nothing here ends a training: a terminal that is gone is the end of the drawing only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd._optional import require
from raysgd.callbacks._above import lines_above
from raysgd.replicas import readable

Style = Literal["auto", "rich", "tqdm", "plain"]
STYLES = ("auto", "rich", "tqdm", "plain")

_QUIET_S = 60.0
_WIDTH_OF_NUMBERS = 6
_SPEAK_FOR_THEMSELVES = ("time", "throughput", "workers")


@dataclass(frozen=True)
class View:
    """What a bar shows of a running call.

    Attributes:
        label: What runs, such as "epoch 3/10".
        phase: What the call does: "train", "validate".
        done: Batches so far.
        total: All batches; None if that is not known.
        values: Metrics by name, as text.
    """

    label: str
    phase: str
    done: int
    total: int | None
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What runs."""
        return f"{self.label} {self.phase}".strip()

    @property
    def count(self) -> str:
        """How far it is."""
        return f"{self.done}/{self.total}" if self.total is not None else f"{self.done} batches"

    @property
    def text(self) -> str:
        """The metrics in one line."""
        return "  ".join(f"{name} {value}" for name, value in self.values.items())


class Bar(ABC):
    """Draws on one stream."""

    @abstractmethod
    def draw(self, view: View) -> None:
        """Draws, or draws again."""

    @abstractmethod
    def clear(self) -> None:
        """Takes away what was drawn."""

    @abstractmethod
    def row(self, label: str, values: Mapping[str, str]) -> None:
        """Writes a result, which stays."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Writes a line, which stays."""


class LineBar(Bar):
    """For log files: lines only, in columns. A call that takes long has a line every minute.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._widths: dict[str, int] = {}
        self._last_line = time.monotonic()

    def draw(self, view: View) -> None:
        if time.monotonic() - self._last_line >= _QUIET_S:
            of = f"/{view.total}" if view.total is not None else ""
            self.line(f"{view.title} {view.done}{of} batches  {view.text}".rstrip())

    def clear(self) -> None:
        pass

    def row(self, label: str, values: Mapping[str, str]) -> None:
        self.line(self._in_columns(label, values))

    def line(self, text: str) -> None:
        self._last_line = time.monotonic()
        with _while_there_is_a_reader():
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def _in_columns(self, label: str, values: Mapping[str, str]) -> str:
        """A row whose values stand below those of the rows before."""
        cells = [_name_before(name) + self._padded(name, value) for name, value in values.items()]
        return "  ".join([self._padded("", label), *cells]).rstrip()

    def _padded(self, name: str, value: str) -> str:
        least = 0 if not name or name in _SPEAK_FOR_THEMSELVES else _WIDTH_OF_NUMBERS
        width = self._widths[name] = max(self._widths.get(name, least), len(value))
        return value.ljust(width)


class TqdmBar(LineBar):
    """A bar of tqdm, which is cleared when the call is over.

    Args:
        stream: Where to draw: a terminal.
        purpose: What needs tqdm.
    """

    def __init__(self, stream: Any, purpose: str) -> None:
        super().__init__(stream)
        self._tqdm = require("tqdm", extra="progress", purpose=purpose).tqdm
        self._bar: Any = None
        self._redirected = contextlib.ExitStack()

    def draw(self, view: View) -> None:
        with _while_there_is_a_reader():
            bar = self._open(view)
            bar.set_description(view.title, refresh=False)
            bar.total, bar.n = view.total, view.done
            bar.set_postfix(view.values, refresh=False)
            bar.refresh()

    def _open(self, view: View) -> Any:
        if self._bar is None:
            options = {
                "unit": "batch",
                "leave": False,
                "dynamic_ncols": True,
                "delay": 1e-9,
            }
            self._bar = self._tqdm(initial=view.done, total=view.total, file=self._stream, **options)
            self._redirected.enter_context(lines_above(self._stream, self._bar.clear, self._bar.refresh))
        return self._bar

    def clear(self) -> None:
        bar, self._bar = self._bar, None
        self._redirected.close()
        if bar is not None:
            with _while_there_is_a_reader():
                bar.close()


class RichBar(LineBar):
    """A bar of rich, which is cleared when the call is over.

    Args:
        stream: Where to draw: a terminal.
        purpose: What needs rich.
    """

    def __init__(self, stream: Any, purpose: str) -> None:
        super().__init__(stream)
        self._rich = require("rich.progress", extra="progress", purpose=purpose)
        self._text = require("rich.text", extra="progress", purpose=purpose).Text
        console = require("rich.console", extra="progress", purpose=purpose).Console
        self._console = console(file=stream, highlight=False, emoji=False, markup=False)
        self._progress: Any = None
        self._task: Any = None
        self._redirected = contextlib.ExitStack()

    def draw(self, view: View) -> None:
        with _while_there_is_a_reader():
            if self._progress is None:
                self._open(view)
            self._progress.update(
                self._task,
                description=view.title,
                total=view.total,
                completed=view.done,
                values=view.text,
                left=self._time_left(),
                count=view.count,
            )
            self._progress.refresh()

    def _open(self, view: View) -> None:
        rich = self._rich
        is_wide = self._console.width >= 80
        columns = [
            rich.TextColumn("{task.description}", style="bold"),
            rich.BarColumn(bar_width=30 if is_wide else 10, complete_style="cyan", finished_style="cyan"),
            rich.TextColumn("{task.fields[count]}"),
        ]
        if is_wide:
            columns.append(rich.TextColumn("{task.fields[left]}", style="dim"))
        columns.append(rich.TextColumn("{task.fields[values]}", style="cyan", markup=False))
        self._progress = rich.Progress(
            *columns, console=self._console, transient=True, auto_refresh=False, redirect_stdout=is_terminal(sys.stdout)
        )
        self._task = self._progress.add_task("", total=view.total, completed=view.done, count="", values="", left="")
        self._progress.start()
        self._redirected.enter_context(lines_above(self._stream))

    def _time_left(self) -> str:
        """How long the call still takes; nothing while that cannot be told."""
        left = self._progress.tasks[0].time_remaining
        return f"{readable.seconds(left)} left" if left is not None and left >= 1 else ""

    def clear(self) -> None:
        progress, self._progress = self._progress, None
        self._redirected.close()
        if progress is not None:
            with _while_there_is_a_reader():
                progress.stop()

    def row(self, label: str, values: Mapping[str, str]) -> None:
        text = self._text(self._padded("", label), style="bold")
        for name, value in values.items():
            text.append(f"  {_name_before(name)}", style="not bold dim")
            text.append(self._padded(name, value), style="not bold")
        self._print(text)

    def line(self, text: str) -> None:
        self._print(self._text(text))

    def _print(self, text: Any) -> None:
        text.rstrip()
        with _while_there_is_a_reader():
            self._console.print(text, soft_wrap=True)


class NotebookBar(Bar):
    """In a notebook: one table of results that grows, with a bar below it while a call runs."""

    def __init__(self) -> None:
        self._display: Any = None
        self._rows: list[tuple[str, Mapping[str, str]]] = []
        self._lines: list[str] = []
        self._view: View | None = None

    def draw(self, view: View) -> None:
        self._view = view
        self._show()

    def clear(self) -> None:
        if self._view is not None:
            self._view = None
            self._show()

    def row(self, label: str, values: Mapping[str, str]) -> None:
        self._rows.append((label, values))
        self._show()

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._show()

    def _show(self) -> None:
        from IPython.display import HTML, display

        from raysgd.callbacks._notebook import progress_card

        is_empty = not (self._rows or self._lines or self._view)
        card = HTML("" if is_empty else progress_card(self._rows, self._view, self._lines))
        if self._display is None:
            self._display = display(card, display_id=True)
        else:
            self._display.update(card)


def make_bar(style: Style, stream: Any, purpose: str) -> Bar:
    """What draws in this style on a stream.

    A stream that is not a terminal gets lines in any style.

    Raises:
        ModuleNotFoundError: The package that the style needs is not installed.
    """
    if style == "rich":
        require("rich", extra="progress", purpose=purpose)
    elif style == "tqdm":
        require("tqdm", extra="progress", purpose=purpose)
    if style != "plain" and is_notebook():
        return NotebookBar()
    if style == "plain" or not is_terminal(stream):
        return LineBar(stream)
    if style == "tqdm":
        return TqdmBar(stream, purpose)
    return RichBar(stream, purpose) if style == "rich" else _best(stream, purpose)


def _best(stream: Any, purpose: str) -> Bar:
    for kind in (RichBar, TqdmBar):
        with contextlib.suppress(ImportError):
            return kind(stream, purpose)
    return LineBar(stream)


def is_notebook() -> bool:
    """Whether output goes to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can draw over a line."""
    is_one = bool(getattr(stream, "isatty", lambda: False)())
    return is_one and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _name_before(name: str) -> str:
    """A name as it stands before its value in a line; nothing before values that have a unit."""
    return "" if name in _SPEAK_FOR_THEMSELVES else f"{name} "


@contextlib.contextmanager
def _while_there_is_a_reader() -> Iterator[None]:
    """Lets a training go on whose terminal was closed, or whose log file cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # a closed stream is a ValueError
        logging.getLogger(__name__).debug("the progress cannot be shown: %s", error)
