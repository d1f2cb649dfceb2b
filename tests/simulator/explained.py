"""Random edits of the engine that neither the simulator nor a unit test of the engine finds, and why that is right."""

# ruff: noqa: E501 (an edit is a line)

from __future__ import annotations

_RAY = "what Ray does, which only the integration tests run"
_PACE = "how soon it is looked at again, not what is done then"
_WORDS = "only which lines of a status stand together"
_OWN_PROCESS = "its test runs it in a process of its own, without the edit"
_SCHEDULE = "a schedule of its own in `test_simulator` finds it"

EXPLAINED = {
    "monitor.Monitor._next_round_s: `group is not None` -> `group is None`": _PACE,
    "monitor.Monitor._num_asked: `0` -> `1`": _PACE,
    "worker._drop: `os.open(os.devnull, os.O_RDWR)` -> `os.open(os.O_RDWR, os.devnull)`": _OWN_PROCESS,
    "platform._cause_of: `missing` -> `not missing`": _RAY,
    "gathering.grace_s: `False` -> `True`": "a default that the listener always overrides",
    "group.WorkerGroup._run_local: `True` -> `False`": _SCHEDULE,
    "worker.outcome_of: `0` -> `1`": "a fault of rank 0 gets the rank of its answer, which is 0",
    "group.WorkerGroup.stop: `worker.kill()` -> `pass`": "all workers are ended right after it, this one too",
    "placement.guard: `0` -> `1`": _RAY,
    "placement.Reservation._await_removal: `_state_of(group) != 'REMOVED'` -> `_state_of(group) == 'REMOVED'`": _RAY,
    "placement.Reservation._await_removal: `time.monotonic() + timeout_s` -> `time.monotonic() - timeout_s`": _RAY,
    "placement.Reservation.close: `not self.is_own` -> `not not self.is_own`": _RAY,
    "platform.Platform.kill_process: `0` -> `1` (2)": _RAY,
    "platform._sigkill: `os.kill(pid, signal.SIGKILL)` -> `pass`": _RAY,
    "snapshots.is_due: `num_calls > _MAX_CALLS` -> `num_calls >= _MAX_CALLS`": "one call of ten thousand less is kept",
    "types.Heartbeat: `0` -> `1` (3)": "a snapshot that there is not is asked for once, and no rank has it",
    "types.Rendezvous: `32` -> `33`": "a longer secret is as good",
    "worker.WorkerProcess._prepare: `self._connection.load()` -> `pass`": "what is loaded in advance is else loaded when it is used",
    "worker.WorkerProcess.relay: `[value] = ray.get(list(references))` -> `return`": _RAY,
    "worker.RaySGDWorker.__init__: `os.environ['CUDA_VISIBLE_DEVICES'] = ''` -> `pass`": _RAY,
    "group.WorkerGroup.fetch_parts: `StoredPart(self.infos[keeper].node_id, copy)` -> `StoredPart(copy, self.infos[keeper].node_id)`": _RAY,
    "group.WorkerGroup.kill_rank: `self.workers[rank].kill()` -> `pass`": "the signal of the next line ends the process as well; the first way is for where no other process can be started",
    "group.WorkerGroup.renew: `False` -> `True`": "a copy is made that no one uses",
}
