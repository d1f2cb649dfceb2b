"""`TorchWorkerProfiler`: traces of `torch.profiler`, from the workers to the driver."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from raysgd._files import check_local
from raysgd.air._running import running_session
from raysgd.train.constants import PYTORCH_PROFILER_KEY


class TorchWorkerProfiler:
    """Collects the traces of `torch.profiler` in a worker, for `TorchTensorboardProfilerCallback` in the driver.

    Args:
        trace_dir: Where traces are written in the worker. Default: a folder for temporary files.

    Raises:
        SessionMisuseError: Outside of a training function.
    """

    def __init__(self, trace_dir: str | None = None) -> None:
        self._rank = running_session("TorchWorkerProfiler").world.rank
        check_local("trace_dir", trace_dir)
        folder = Path(trace_dir) if trace_dir else Path(tempfile.gettempdir()) / "pytorch_profiler_worker_traces"
        folder.mkdir(parents=True, exist_ok=True)
        self.trace_dir = folder
        self._names: list[str] = []

    def trace_handler(self, p: torch.profiler.profile) -> None:
        """Pass it to `torch.profiler.profile` as `on_trace_ready`."""
        name = f"worker_{self._rank}_epoch_{p.step_num}.pt.trace.json"
        p.export_chrome_trace(str(self.trace_dir / name))
        self._names.append(name)

    def get_and_clear_profile_traces(self) -> dict[str, list[tuple[str, str]]]:
        """The traces since the last time, to be passed on: `report(**profiler.get_and_clear_profile_traces())`."""
        names, self._names = self._names, []
        return {PYTORCH_PROFILER_KEY: [(name, (self.trace_dir / name).read_text()) for name in names]}
