"""A callback that writes the traces that `TorchWorkerProfiler` recorded in the workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysgd.core.text.log_lines import Once
from raysgd.core.writers.sinks import failures_warned
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.logging import LogdirManager
from raysgd.train.callbacks.results_preprocessors import IndexedResultsPreprocessor
from raysgd.train.constants import PYTORCH_PROFILER_KEY

_FOLDER = "pytorch_profiler"


class TorchTensorboardProfilerCallback(TrainingCallback):
    """Writes traces from the workers to files for TensorBoard.

    In the training function, report the traces that `TorchWorkerProfiler.get_and_clear_profile_traces` returns.

    Args:
        logdir: Folder of the files. Default: `pytorch_profiler` in the run's folder.
        workers_to_log: A rank, several ranks, or None for all.
    """

    RESERVED_KEYS = frozenset({PYTORCH_PROFILER_KEY})

    def __init__(self, logdir: str | None = None, workers_to_log: int | Iterable[int] | None = None) -> None:
        self._logdir = LogdirManager(logdir)
        self._warned = Once()
        self.results_preprocessor = IndexedResultsPreprocessor(workers_to_log)

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        self._logdir.setup_logdir(str(Path(logdir) / _FOLDER))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        with failures_warned(type(self).__name__, self._warned):
            for result in results:
                for name, text in result.get(PYTORCH_PROFILER_KEY, ()):
                    (self._logdir.logdir_path / name).write_text(text)
