"""`TorchWorkerProfiler`: writes the traces of a worker's profiler, and gives them to the function to report."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from raysgd.air.session import helper_session
from raysgd.core.files import check_local
from raysgd.train.constants import PYTORCH_PROFILER_KEY


class TorchWorkerProfiler:
    """Collects `torch.profiler` traces in a worker, for `TorchTensorboardProfilerCallback` in the driver.

    Args:
        trace_dir: Folder for traces on the worker's machine. Default: `pytorch_profiler_worker_traces` in the system's
            temporary folder.
    """

    def __init__(self, trace_dir: str | None = None) -> None:
        self._rank = helper_session().world.rank
        check_local("trace_dir", trace_dir)
        folder = Path(trace_dir) if trace_dir else Path(tempfile.gettempdir()) / "pytorch_profiler_worker_traces"
        folder.mkdir(parents=True, exist_ok=True)
        self.trace_dir = folder
        self._names: list[str] = []

    def trace_handler(self, p: torch.profiler.profile) -> None:
        """Write the trace that a profiler has recorded.

        Pass this method to `torch.profiler.profile` as `on_trace_ready`.
        """
        name = f"worker_{self._rank}_epoch_{p.step_num}.pt.trace.json"
        p.export_chrome_trace(str(self.trace_dir / name))
        self._names.append(name)

    def get_and_clear_profile_traces(self) -> dict[str, list[tuple[str, str]]]:
        """Return the traces that were written since the last call.

        Report them with `report(**profiler.get_and_clear_profile_traces())`.
        """
        names, self._names = self._names, []
        return {PYTORCH_PROFILER_KEY: [(name, (self.trace_dir / name).read_text()) for name in names]}
