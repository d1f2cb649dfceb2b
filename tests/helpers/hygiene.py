"""What a test must not leave behind, and how to find it.

Each check compares the surroundings before and after a test and returns sentences, one for each thing that
was left. Those that look at other processes or threads wait a little, because an orderly end takes a moment.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S, COLLECTS_AFTER_S = 60.0, 0.3
OWN_FILES = "raysgd"

# Set by other software when it is imported or started, once and for the whole process.
_FOREIGN_VARIABLES = (
    "PYTEST_",
    "RAY_",
    "KMP_",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "ACCELERATE_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "CUDA_MODULE_LOADING",
    "CRC32C_SW_MODE",
)
# Actors that Ray Data starts once for a whole cluster.
_SERVICES_OF_RAY = {"ActorLocationTracker", "_AutoscalingCoordinatorActor", "_StatsActor"}


@dataclass(frozen=True)
class Surroundings:
    """What was there before a test."""

    environment: Mapping[str, str]
    threads: frozenset[threading.Thread]
    files: frozenset[Path]

    @classmethod
    def now(cls) -> Surroundings:
        """Look around."""
        return cls(dict(os.environ), frozenset(_threads()), frozenset(_files()))

    def leaks(self) -> list[str]:
        """Name what has come since, and clear away what can be."""
        return [
            *self._changed_variables(),
            *_process_groups(),
            *_sessions(),
            *_after_a_while(lambda: [f"thread {thread}" for thread in _threads() - self.threads]),
            *(f"file {path}" for path in sorted(_files() - self.files)),
        ]

    def _changed_variables(self) -> list[str]:
        changed = changed_variables(self.environment, os.environ)
        for name in changed:
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]
        return [f"environment variable {name}" for name in changed]


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Name the variables that were added, removed or changed, those of other software aside."""
    return sorted(
        name
        for name in {*before, *after}
        if before.get(name) != after.get(name) and not name.startswith(_FOREIGN_VARIABLES)
    )


@dataclass(frozen=True)
class RaySurroundings:
    """What a running Ray cluster held before a test: shared fixtures may own actors and reservations."""

    actors: frozenset[str]
    placement_groups: frozenset[str]
    free: Mapping[str, float]

    @classmethod
    def now(cls) -> RaySurroundings:
        """Look around in the cluster this process is connected to."""
        return cls(frozenset(_live_actors()), frozenset(_placement_groups()), _free_resources())

    def leaks(self) -> list[str]:
        """Name what is still held and was not before, after waiting for what is on its way out."""
        return _after_a_while(self._leaks)

    def _leaks(self) -> list[str]:
        free = _free_resources()
        return [
            *(f"actor {text}" for actor, text in _live_actors().items() if actor not in self.actors),
            *(
                f"placement group {text}"
                for key, text in _placement_groups().items()
                if key not in self.placement_groups
            ),
            *(
                f"{amount - free.get(name, 0.0):g} of {name}, still in use"
                for name, amount in self.free.items()
                if free.get(name, 0.0) < amount
            ),
        ]


def _after_a_while(leaks: Callable[[], list[str]]) -> list[str]:
    began = time.monotonic()
    while (found := leaks()) and time.monotonic() < began + PATIENCE_S:
        if time.monotonic() > began + COLLECTS_AFTER_S:  # it takes a core for a good while
            gc.collect()  # handles in reference cycles, such as tracebacks, keep actors alive
        time.sleep(0.05)
    return found


def _threads() -> set[threading.Thread]:
    threads = {thread for thread in threading.enumerate() if not thread.daemon}
    has_compiled = "torch._inductor" in sys.modules  # whose pool, from PyTorch 2.14 on, stays
    return {thread for thread in threads if not (has_compiled and thread.name.startswith("ThreadPoolExecutor"))}


def _files() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{OWN_FILES}*"))


def _process_groups() -> list[str]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised process group of torch.distributed"]


def _sessions() -> list[str]:
    running: Any = sys.modules.get("raysgd.air.session")
    session = running.current_session() if running is not None else None
    if session is None:
        return []
    running.close_session(session)
    return ["the session of a training function"]


def _live_actors() -> dict[str, str]:
    # The public listing asks the dashboard, which test clusters do without.
    from ray._private.state import actors

    return {
        key: f"{facts['ActorClassName']} ({facts['State']}, pid {facts['Pid']})"
        for key, facts in actors().items()
        if facts["State"] != "DEAD" and facts["ActorClassName"] not in _SERVICES_OF_RAY
    }


def _placement_groups() -> dict[str, str]:
    from ray.util import placement_group_table

    return {
        key: f"{key} ({facts['state']})"
        for key, facts in placement_group_table().items()
        if facts["state"] != "REMOVED"
    }


def _free_resources() -> dict[str, float]:
    import ray

    # Memory is excluded: objects leave the store whenever it suits Ray.
    return {name: amount for name, amount in ray.available_resources().items() if name in {"CPU", "GPU"}}
