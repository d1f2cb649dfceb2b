"""Loans: a standby worker runs a call beside training, such as a validation, until the worker group needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.core.cluster.call_lines import Reference
from raysgd.core.engine.liveness import LivenessCheck
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared import replica
from raysgd.core.engine.shared.group_spec import GroupSpec
from raysgd.core.engine.shared.types import Answered, Failed
from raysgd.core.engine.worker import RemoteWorker, StandbyWorker, WorkerProcess, notes_of, pack
from raysgd.exceptions import OnFailure

_ROUND_S = 0.5


class Loan:
    """Lets a standby worker run a call beside the training until the worker group needs the worker.

    A loan is for at most one call. While one thread waits for the call, another thread may recall the worker.

    Args:
        standby_worker: The worker to lend.
        number: Number of the loan. Numbers increase with each loan.
        platform: Used to wait for the worker's answers and to kill its process.
        spec: Settings of the worker group. Only `heartbeat_s` and `relay` are used.

    Attributes:
        is_recalled: True if the group needs the worker. The call must then end.
        call: Ray's reference to the call that the worker runs, or None if no call was started.
    """

    def __init__(self, standby_worker: StandbyWorker, number: int, platform: Platform, spec: GroupSpec) -> None:
        self.standby_worker = standby_worker
        self.is_recalled = False
        self._worker, self._number, self._platform, self._relay = standby_worker.worker, number, platform, spec.relay
        self._liveness: LivenessCheck[RemoteWorker] = LivenessCheck(
            spec.heartbeat_s, lambda worker, call: platform.outcome(-1, call), platform.now
        )
        self._lock = threading.Lock()
        self.call: Reference | None = None
        self._has_ended = False

    def run_call(
        self, function: Callable[..., Any], make_args: Callable[[], Sequence[Any]], on_wait: Callable[[], None]
    ) -> Answered | Failed | None:
        """Run `function(replica, loan_number, *args)` on the standby worker and wait for the result.

        Args:
            function: Called on the worker. If the loan is recalled, it must stop between two batches and return None.
            make_args: Returns the arguments `args` for `function`.
            on_wait: Called regularly during the call. If `on_wait` or `make_args` raises, the loan is recalled.

        Returns:
            The outcome of the call. None if the worker was lost, or if it was recalled before the call was complete.
        """
        try:
            with OnFailure(self.recall):
                packed = pack(function, False, None, (self._number, *make_args()))
                # Start the call under the lock: after a recall, the worker may already be a member of the group.
                with self._lock:
                    if self.is_recalled:
                        return None
                    self.call = self._worker.submit(WorkerProcess.on_packed, *packed)
                while not self._platform.ready([self.call], _ROUND_S):
                    on_wait()
                    self._liveness.ask([self._worker], lambda worker: worker.submit(WorkerProcess.describe))
                    if self._liveness.poll()[1]:
                        self._worker.kill()
                        self._platform.kill_process(self.standby_worker.info)
                outcome = self._platform.outcome(-1, self.call)
        finally:
            self._has_ended = True
        self._relay.tell({"spare": notes_of(outcome)})
        if isinstance(outcome, Answered):
            return outcome if outcome.value.value is not None else None
        return outcome if isinstance(outcome, Failed) and not (self.is_recalled or outcome.has_died) else None

    def recall(self) -> None:
        """End the loan: make the worker's call stop between two batches, or prevent the call from starting.

        Callable from any thread.
        """
        with self._lock:
            self.is_recalled = True
            if self.call is not None:
                self._worker.submit(WorkerProcess.beside, replica.leave_call, self._number)

    @property
    def is_over(self) -> bool:
        """True if the worker's call has ended, or will never start."""
        is_free = self.call is None or self._platform.outcome(-1, self.call).answered
        return is_free and (self._has_ended or self.is_recalled)

    @property
    def has_died(self) -> bool:
        """True if the worker died during its call."""
        return self.call is not None and self._platform.outcome(-1, self.call).has_died
