"""Lines that are printed and logged while a bar of tqdm is drawn: they go above the bar."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any


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
