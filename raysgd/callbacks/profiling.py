"""`ProfilerTrace`: traces of some steps in every worker, for Chrome's trace viewer or Perfetto."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysgd._arguments import checks
from raysgd.callbacks.callback import Callback
from raysgd.callbacks.worker_callback import WorkerCallback, rank_of
from raysgd.storage import Folder, open_folder


class ProfilerTrace(Callback):
    """Records some steps of a run with `torch.profiler` and writes `rank0.json`, `rank1.json` and so on.

    Open the files in https://ui.perfetto.dev. For `TorchTrainer`.

    Args:
        folder: Where the files go: a folder that all workers see, or a URI such as `s3://bucket/traces`.
        steps: The first step to record, and the one before which recording ends, both from 0 in the run of a worker.
            Recording ends with the epoch at the latest.
        ranks: Which workers record; None for all.

    Raises:
        ValueError, TypeError: An argument is wrong.

    Examples:
        >>> trace = ProfilerTrace("traces", steps=(10, 15))
    """

    def __init__(
        self, folder: str | Path, steps: tuple[int, int] = (1, 4), *, ranks: Iterable[int] | None = None
    ) -> None:
        self._folder = open_folder(folder, argument="folder")
        if self._folder.is_local:  # workers may have another working directory
            self._folder = open_folder(self._folder.local_path.absolute())
        self.steps = _checked_steps(steps)
        self.ranks = None if ranks is None else _checked_ranks(ranks)

    def worker_callback(self) -> WorkerCallback:
        """Records in the workers."""
        return ProfilerInWorker(self._folder, self.steps, self.ranks)


class ProfilerInWorker(WorkerCallback):
    """Records in one worker."""

    def __init__(self, folder: Folder, steps: tuple[int, int], ranks: frozenset[int] | None) -> None:
        self._folder, self._ranks = folder, ranks
        self._first, self._end = steps
        self._num_steps = 0
        self._profiler: Any = None

    def on_epoch_begin(self, operator: Any) -> None:
        self._begin_if_due(operator)

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        self._num_steps += 1
        if self._num_steps >= self._end:
            self._finish(operator)
        else:
            self._begin_if_due(operator)

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        self._finish(operator)

    def _begin_if_due(self, operator: Any) -> None:
        is_chosen = self._ranks is None or rank_of(operator) in self._ranks
        if self._num_steps == self._first and is_chosen and self._profiler is None:
            from torch.profiler import profile

            self._profiler = profile()
            self._profiler.start()

    def _finish(self, operator: Any) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="raysgd-") as temporary:
            path = Path(temporary, "trace.json")
            profiler.export_chrome_trace(str(path))
            self._folder.write(f"rank{rank_of(operator)}.json", path.read_bytes())


def _checked_ranks(ranks: Any) -> frozenset[int]:
    found = list(ranks) if isinstance(ranks, Iterable) else []
    if not found or not all(checks.is_integer(rank) and rank >= 0 for rank in found):
        raise ValueError(f"`ranks={ranks!r}`: need a list of ranks, each 0 or more, such as [0, 1], or None for all.")
    return frozenset(map(int, found))


def _checked_steps(steps: Any) -> tuple[int, int]:
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2 and all(map(checks.is_integer, steps))
    if not is_pair or not 0 <= steps[0] < steps[1]:
        raise ValueError(f"`steps={steps!r}`: need the first step and the one before which to end, such as (10, 15).")
    return int(steps[0]), int(steps[1])
