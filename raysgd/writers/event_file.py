"""Files that TensorBoard reads, written with tensorboardX."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from raysgd._nested import flattened
from raysgd._once import Once
from raysgd._optional import require, require_installed

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0


class EventFile:
    """Writes metrics to an event file. A thread puts them on the disk, within two seconds.

    Args:
        folder: Where the file is.
        prefix: What the names of all metrics begin with, without a slash at the end; "" for nothing.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    VALID_SUMMARY_TYPES = (int, float, np.float32, np.float64, np.int32, np.int64)

    def __init__(self, folder: Path, prefix: str) -> None:
        tensorboard = require("tensorboardX", extra="tensorboard", purpose="a file for TensorBoard")
        self._summary = require("tensorboardX.summary", extra="tensorboard", purpose="a file for TensorBoard")
        self._writer = tensorboard.SummaryWriter(str(folder), flush_secs=_FLUSH_S)
        self._prefix = f"{prefix}/" if prefix else ""
        self._once = Once()

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Writes one report. What TensorBoard cannot show is left out, with a warning once for each name."""
        scalars = {}
        for name, value in flattened(metrics).items():
            if isinstance(value, self.VALID_SUMMARY_TYPES):
                scalars[f"{self._prefix}{name}"] = value
            else:
                self._write(f"{self._prefix}{name}", value, step)
        self._write_scalars({name: value for name, value in scalars.items() if not math.isnan(value)}, step)

    def flush(self) -> None:
        """Waits until everything is on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Ends the file and its thread."""
        self._writer.close()

    def _write_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Writes all of them at once, because each event wakes the thread that writes."""
        if scalars:
            first, *others = (self._summary.scalar(name, value) for name, value in scalars.items())
            for other in others:
                first.MergeFrom(other)
            self._writer.file_writer.add_summary(first, step)

    def _write(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, np.ndarray) and value.ndim == 5:
            self._writer.add_video(name, value, global_step=step, fps=20)
        elif isinstance(value, list | np.ndarray) and len(value) > 0:
            self._try(name, value, step)
        elif not isinstance(value, Mapping):
            self._warn(name, value)

    def _try(self, name: str, value: Any, step: int) -> None:
        try:
            self._writer.add_histogram(name, value, global_step=step)
        except (TypeError, ValueError):  # a list of something else than numbers
            self._warn(name, value)

    def _warn(self, name: str, value: Any) -> None:
        if self._once.is_first(name):
            logger.warning("`%s` is not written for TensorBoard: it is a %s", name, type(value).__name__)


class LateEventFile:
    """The same, opened in a thread from the first report on.

    tensorboardX imports PyTorch, which takes a second where the driver has not done so. Neither the start of a run nor
    a report waits for it.

    Args:
        folder: Where the file is.
        prefix: What the names of all metrics begin with.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        require_installed("tensorboardX", extra="tensorboard", purpose="a file for TensorBoard")
        self._folder, self._prefix = folder, prefix
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="raysgd-tensorboard")
        self._opening: Future[EventFile] | None = None
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._once = Once()

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Writes one report as soon as the file is open."""
        self._waiting.append((dict(metrics), step))
        if self._opening is None:
            self._opening = self._opener.submit(EventFile, self._folder, self._prefix)
        if self._opening.done():
            self._write_waiting()

    def close(self) -> None:
        """Writes what waits and ends the file and its thread."""
        self._opener.shutdown()
        if self._opening is not None:
            self._write_waiting()
            if self._opening.exception() is None:
                self._opening.result().close()

    def _write_waiting(self) -> None:
        assert self._opening is not None
        waiting, self._waiting = self._waiting, []
        error = self._opening.exception()
        for metrics, step in waiting if error is None else []:
            self._opening.result().write(metrics, step)
        if error is not None and self._once.is_first("broken"):
            logger.warning("no file for TensorBoard: %s", error)
