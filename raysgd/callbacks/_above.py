"""Sends what is printed and logged while a bar is drawn above the bar."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any


class _Above(io.TextIOBase):
    """Takes whole lines, and lets the bar out of their way.

    Args:
        stream: Where the lines go.
        hide: Takes the bar away.
        show: Draws it again.
    """

    def __init__(self, stream: Any, hide: Callable[[], Any], show: Callable[[], Any]) -> None:
        self._stream, self._hide, self._show = stream, hide, show
        self._begun = ""
        self.is_open = True

    def write(self, text: str) -> int:
        if not self.is_open:
            return int(self._stream.write(text) or 0)
        lines, end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if end:
            self._hide()
            self._stream.write(lines + end)
            self._stream.flush()
            self._show()
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
        self.is_open = False
        if self._begun:
            self._stream.write(self._begun)


@contextlib.contextmanager
def lines_above(
    stream: Any, hide: Callable[[], Any] | None = None, show: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Until the end of the block, lines of prints and of logging go above the bar that is drawn on `stream`.

    Args:
        stream: The terminal.
        hide: Takes the bar away; None if what draws it has replaced `sys.stdout` and `sys.stderr` already.
        show: Draws it again.
    """
    with contextlib.ExitStack() as stack:
        if hide is not None and show is not None:
            for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
                before = getattr(sys, name)
                if before is stream or (before is not None and before.isatty()):
                    above = _Above(before, hide, show)
                    stack.callback(above.end)
                    stack.enter_context(redirect(above))
        stack.enter_context(_handlers_follow(stream))
        yield


@contextlib.contextmanager
def _handlers_follow(stream: Any) -> Iterator[None]:
    """Handlers that write to the terminal keep the stream that they were made with: until the end they use today's."""
    moved = []
    for handler in _handlers():
        former = handler.stream
        if former is sys.__stderr__ or former is stream:
            moved.append((handler, former))
            handler.setStream(sys.stderr)
        elif former is sys.__stdout__:
            moved.append((handler, former))
            handler.setStream(sys.stdout)
    try:
        yield
    finally:
        for handler, former in moved:
            handler.setStream(former)


def _handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [each for each in dict.fromkeys(found) if type(each) is logging.StreamHandler]
