"""The bar of `use_tqdm=True`: one for each call of `train`, with the words of the old library.

In a terminal or a notebook it is cleared when the epoch ends. In a log file it is one line at the end of the epoch.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from raysgd._imports.optional import require
from raysgd._numbers.call_progress import CallProgress
from raysgd.callbacks.display.bars import BarView, LineBar, make_bar

_PURPOSE = "`use_tqdm=True`"


class EpochBar:
    """Shows one epoch. Use it as a context manager and call `show` as often as there is news.

    Args:
        stream: Where to draw; standard error by default.
    """

    def __init__(self, stream: Any = None) -> None:
        self._bar = make_bar("tqdm", stream or sys.stderr, _PURPOSE)
        self._last: CallProgress | None = None
        self._began = time.monotonic()

    def __enter__(self) -> EpochBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.clear()
        if type(self._bar) is LineBar and self._last is not None and kind is None:
            self._bar.line(self._line(self._last))

    def show(self, progress: CallProgress) -> None:
        """Draws the news."""
        self._last = progress
        if type(self._bar) is not LineBar:
            values = {"loss": f"{progress.loss:.4g}"} if progress.loss is not None else {}
            self._bar.draw(BarView(_label(progress), "", progress.num_steps, progress.total, values))

    def _line(self, progress: CallProgress) -> str:
        line: str = require("tqdm", extra="progress", purpose=_PURPOSE).tqdm.format_meter(
            n=progress.num_steps,
            total=progress.total,
            elapsed=time.monotonic() - self._began,
            ncols=100,
            prefix=_label(progress),
            unit="batch",
            postfix=f"loss={progress.loss:.4g}" if progress.loss is not None else None,
        )
        return line


def _label(progress: CallProgress) -> str:
    epochs = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"{progress.epoch_idx + 1}{epochs}e"
