"""The progress bar, drawn in the driver: workers only count.

In a terminal or a notebook it is one bar that is cleared when the epoch ends. In a log file, where a bar would fill
pages, it is one line at the end of the epoch.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from raysgd._optional import require
from raysgd.replicas.epochs import Progress


class ProgressBar:
    """Shows one epoch. Use it as a context manager and call `show` as often as there is news.

    Args:
        stream: Where to draw; standard error by default.
    """

    def __init__(self, stream: Any = None) -> None:
        self._tqdm = require("tqdm.auto", extra="progress", purpose="`use_tqdm=True`").tqdm
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._last: Progress | None = None
        self._began = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._last is not None and kind is None:
            self._stream.write(self._line(self._last) + "\n")
            self._stream.flush()

    def show(self, progress: Progress | None) -> None:
        """Draws the news; None means there are none."""
        if progress is None:
            return
        self._last = progress
        if not self._is_interactive():
            return
        if self._bar is None:
            self._bar = self._tqdm(
                total=progress.total, desc=_label(progress), unit="batch", leave=False, file=self._stream
            )
        self._bar.n = progress.num_steps
        if progress.loss is not None:
            self._bar.set_postfix({"loss": f"{progress.loss:.4g}"}, refresh=False)
        self._bar.refresh()

    def _is_interactive(self) -> bool:
        return "ipykernel" in sys.modules or bool(getattr(self._stream, "isatty", lambda: False)())

    def _line(self, progress: Progress) -> str:
        postfix = f"loss={progress.loss:.4g}" if progress.loss is not None else None
        line: str = self._tqdm.format_meter(
            n=progress.num_steps,
            total=progress.total,
            elapsed=time.monotonic() - self._began,
            ncols=100,
            prefix=_label(progress),
            unit="batch",
            postfix=postfix,
        )
        return line


def _label(progress: Progress) -> str:
    epochs = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"{progress.epoch_idx + 1}{epochs}e"
