"""Files that TensorBoard reads, written with tensorboardX."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from raysgd._imports.optional import require, require_installed
from raysgd._numbers.nested import flattened
from raysgd._text.once import Once
from raysgd.writers.sink import LoggedRun, Sink, place_in

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0


class EventFile(Sink):
    """Writes metrics to an event file. A thread puts them on the disk, within two seconds.

    tensorboardX imports PyTorch, which takes a second where the driver has not done so. So another thread opens the
    file, from the first row on: neither the start of a run nor a row waits for it, unless rows are flushed.

    Args:
        folder: Where the file is: an absolute path, or a folder in that of the run; "" for that itself.
        prefix: What the names of all metrics begin with, without a slash at the end; "" for nothing.
        flushes: Whether each row is on the disk when `write` returns.
        purpose: Who needs the package, for the error that it is missing.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    VALID_SUMMARY_TYPES = (int, float, np.float32, np.float64, np.int32, np.int64)

    def __init__(
        self, folder: str | Path, prefix: str, *, flushes: bool = False, purpose: str = "a file for TensorBoard"
    ) -> None:
        require_installed("tensorboardX", extra="tensorboard", purpose=purpose)
        self._folder, self._prefix, self._flushes = Path(folder), f"{prefix}/" if prefix else "", flushes
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._once = Once()
        self._opener: ThreadPoolExecutor | None = None

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        self._path = place_in(run, self._folder)
        self._path.mkdir(parents=True, exist_ok=True)
        self._opener, self._waiting = None, []

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Write one row as soon as the file is open. What cannot be shown is left out, with a warning for each name."""
        self._waiting.append((dict(row), step))
        if self._opener is None:
            self._opener = ThreadPoolExecutor(1, thread_name_prefix="raysgd-tensorboard")
            self._opening = self._opener.submit(_writer_in, self._path)
        if self._flushes or self._opening.done():
            self._write_waiting()

    def close(self, *, has_failed: bool = False) -> None:
        """Write what waits and end the file and its threads."""
        opener, self._opener = self._opener, None
        if opener is None:
            return
        opener.shutdown()
        try:
            self._write_waiting()
        finally:
            self._opening.result().close()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        writer = self._opening.result()
        for row, step in waiting:
            self._write_row(writer, row, step)
        if self._flushes:
            writer.flush()

    def _write_row(self, writer: Any, row: Mapping[str, Any], step: int) -> None:
        scalars = {}
        for name, value in flattened(row).items():
            if not isinstance(value, self.VALID_SUMMARY_TYPES):
                self._write_value(writer, f"{self._prefix}{name}", value, step)
            elif not math.isnan(value):
                scalars[f"{self._prefix}{name}"] = value
        _write_scalars(writer, scalars, step)

    def _write_value(self, writer: Any, name: str, value: Any, step: int) -> None:
        if isinstance(value, np.ndarray) and value.ndim == 5:
            writer.add_video(name, value, global_step=step, fps=20)
        elif isinstance(value, list | np.ndarray) and len(value) > 0:
            try:
                writer.add_histogram(name, value, global_step=step)
            except (TypeError, ValueError):  # a list of something else than numbers
                self._warn(name, value)
        elif not isinstance(value, Mapping):
            self._warn(name, value)

    def _warn(self, name: str, value: Any) -> None:
        if self._once.is_first(name):
            logger.warning("`%s` is not written for TensorBoard: it is a %s", name, type(value).__name__)


def _writer_in(folder: Path) -> Any:
    tensorboard = require("tensorboardX", extra="tensorboard", purpose="a file for TensorBoard")
    return tensorboard.SummaryWriter(str(folder), flush_secs=_FLUSH_S)


def _write_scalars(writer: Any, scalars: Mapping[str, Any], step: int) -> None:
    """Write all of them at once, because each event wakes the thread that writes."""
    summary = require("tensorboardX.summary", extra="tensorboard", purpose="a file for TensorBoard")
    if scalars:
        first, *others = (summary.scalar(name, value) for name, value in scalars.items())
        for other in others:
            first.MergeFrom(other)
        writer.file_writer.add_summary(first, step)
