"""Ways to draw how far a call is: as a bar of tqdm in terminals and notebooks, or as lines in a log file.

What it guarantees:

* While a bar is drawn, everything else that is printed or logged goes above it, in separate lines.
* A bar that is cleared leaves nothing behind. Lines that were written stay.
* Nothing here ends a training: a terminal that is gone is the end of the drawing only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd._imports.optional import require

Style = Literal["auto", "tqdm", "plain"]
STYLES = ("auto", "tqdm", "plain")

_QUIET_S = 60.0
_WIDTH_OF_NUMBERS = 6
_SPEAK_FOR_THEMSELVES = ("time", "throughput", "workers")


@dataclass(frozen=True)
class BarView:
    """The content of a bar for a running call.

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
        """The name of what runs."""
        return f"{self.label} {self.phase}".strip()

    @property
    def text(self) -> str:
        """The metrics in one line."""
        return "  ".join(f"{name} {value}" for name, value in self.values.items())


class LineBar:
    """Progress for log files: lines only, in columns. A call that takes long has a line every minute.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._widths: dict[str, int] = {}
        self._last_line = time.monotonic()

    def draw(self, view: BarView) -> None:
        """Draws, or draws again."""
        if time.monotonic() - self._last_line >= _QUIET_S:
            of = f"/{view.total}" if view.total is not None else ""
            self.line(f"{view.title} {view.done}{of} batches  {view.text}".rstrip())

    def clear(self) -> None:
        """Takes away what was drawn."""

    def row(self, label: str, values: Mapping[str, str]) -> None:
        """Writes a result, which stays."""
        self.line(self._in_columns(label, values))

    def line(self, text: str) -> None:
        """Writes a line, which stays."""
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
    """A bar of tqdm, which is cleared when the call is over. In notebooks it is a widget, if ipywidgets is installed.

    Args:
        stream: Where to draw: a terminal, or the output of a notebook.
        purpose: What needs tqdm.
    """

    def __init__(self, stream: Any, purpose: str) -> None:
        super().__init__(stream)
        self._tqdm = require("tqdm.auto", extra="progress", purpose=purpose).tqdm
        self._bar: Any = None
        self._redirected = contextlib.ExitStack()

    def draw(self, view: BarView) -> None:
        with _while_there_is_a_reader():
            bar = self._open(view)
            bar.set_description(view.title, refresh=False)
            bar.total, bar.n = view.total, view.done
            bar.set_postfix(view.values, refresh=False)
            bar.refresh()

    def _open(self, view: BarView) -> Any:
        if self._bar is None:
            options = {"unit": "batch", "leave": False, "dynamic_ncols": True, "delay": 1e-9}
            self._bar = self._tqdm(initial=view.done, total=view.total, file=self._stream, **options)
            self._redirected.enter_context(lines_above(self._bar, self._stream))
        return self._bar

    def clear(self) -> None:
        bar, self._bar = self._bar, None
        self._redirected.close()
        if bar is not None:
            with _while_there_is_a_reader():
                bar.close()


def make_bar(style: Style, stream: Any, purpose: str) -> LineBar:
    """Return what draws in this style on a stream.

    A stream that can show no bar gets lines in any style.

    Raises:
        ModuleNotFoundError: tqdm is not installed, and the style needs it.
    """
    if style == "tqdm":
        require("tqdm", extra="progress", purpose=purpose)
    if style == "plain" or not (is_terminal(stream) or is_notebook()):
        return LineBar(stream)
    try:
        return TqdmBar(stream, purpose)
    except ImportError:
        return LineBar(stream)


def is_notebook() -> bool:
    """Return whether output goes to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that can draw over a line."""
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


class _Above(io.TextIOBase):
    """Takes whole lines, and lets the bar out of their way.

    Args:
        stream: Where the lines go.
        bar: The bar.
    """

    def __init__(self, stream: Any, bar: Any) -> None:
        self._stream, self._bar = stream, bar
        self._begun = ""

    def write(self, text: str) -> int:
        if self._bar is None:
            return int(self._stream.write(text) or 0)
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            with self._bar.external_write_mode(file=self._bar.fp):
                self._stream.write(lines + end)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def end(self) -> None:
        """From now on texts pass unchanged, for those who keep this object."""
        self._bar = None
        if self._begun:
            self._stream.write(self._begun)


@contextlib.contextmanager
def lines_above(bar: Any, stream: Any) -> Iterator[None]:
    """Until the end of the block, lines of prints and of logging go above a bar of tqdm.

    Args:
        bar: The bar.
        stream: The terminal on which it is drawn.
    """
    with contextlib.ExitStack() as stack:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            before = getattr(sys, name)
            if before is stream or (before is not None and before.isatty()):
                above = _Above(before, bar)
                stack.callback(above.end)
                stack.enter_context(redirect(above))
                for handler in _handlers_of(before):  # which keep the stream that they were made with
                    stack.callback(handler.setStream, before)
                    handler.setStream(above)
        yield


def _handlers_of(stream: Any) -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [each for each in dict.fromkeys(found) if type(each) is logging.StreamHandler and each.stream is stream]
