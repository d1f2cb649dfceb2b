"""The progress bar that `use_tqdm=True` shows in each call to `train`, with a label like "1/5e" for epoch 1 of 5.

In a terminal or a notebook, the bar is cleared when the epoch ends. In a log file, it is a single line at the end of
the epoch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysgd.callbacks.progress import LineBar, make_bar
from raysgd.core.imports import require
from raysgd.core.numbers.results import CallProgress


@contextmanager
def epoch_bar(stream: Any = None) -> Iterator[Callable[[CallProgress], None]]:
    """Show a progress bar during the `with` block. Yield a function that updates the bar.

    Args:
        stream: File object to which the bar is written. Default: standard error.
    """
    bar, began = make_bar(stream or sys.stderr), time.monotonic()
    is_drawn, newest = type(bar) is not LineBar, list[CallProgress]()

    def show(progress: CallProgress) -> None:
        newest[:] = [progress]
        if is_drawn:
            values = {"loss": f"{progress.loss:.4g}"} if progress.loss is not None else {}
            bar.draw(_label(progress), progress.num_steps, progress.total, values)

    try:
        yield show
    finally:
        bar.clear()
    if newest and not is_drawn:
        bar.line(_line(newest[0], time.monotonic() - began))


def _line(progress: CallProgress, elapsed: float) -> str:
    line: str = require("tqdm", extra="progress", purpose="`use_tqdm=True`").tqdm.format_meter(
        n=progress.num_steps,
        total=progress.total,
        elapsed=elapsed,
        ncols=100,
        prefix=_label(progress),
        unit="batch",
        postfix=f"loss={progress.loss:.4g}" if progress.loss is not None else None,
    )
    return line


def _label(progress: CallProgress) -> str:
    epochs = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"{progress.epoch_idx + 1}{epochs}e"
