"""Standby workers that are ready, and loans of them: they run a separate call until the group needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.engine.decisions.liveness import LivenessCheck
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.platform import Platform
from raysgd.engine.shared import replica
from raysgd.engine.shared.types import Outcome, WorkerInfo
from raysgd.engine.worker import RemoteWorker, notes_of, pack

_ROUND_S = 0.5


@dataclass(frozen=True)
class StandbyWorker:
    """A worker that is ready to join a group."""

    worker: RemoteWorker
    info: WorkerInfo
    facts: Any


class Loan:
    """A standby worker that one thread uses while another one may call it back. It runs one call at most.

    Args:
        standby_worker: The worker.
        number: Larger than that of each loan before.
        platform: What it runs on.
        spec: Says after which silence a worker is killed, and where its log lines go.

    Attributes:
        is_recalled: Whether the group needs the worker.
    """

    def __init__(self, standby_worker: StandbyWorker, number: int, platform: Platform, spec: GroupSpec) -> None:
        self.standby_worker = standby_worker
        self.is_recalled = False
        self._worker, self._number, self._platform, self._relay = standby_worker.worker, number, platform, spec.relay
        self._liveness: LivenessCheck[Any] = LivenessCheck(
            spec.heartbeat_s, lambda worker, call: platform.outcome(-1, call), platform.now
        )
        self._lock = threading.Lock()
        self._call: Any = None
        self._has_ended = False

    def run(
        self, function: Callable[..., Any], make_args: Callable[[], Sequence[Any]], on_wait: Callable[[], None]
    ) -> Outcome | None:
        """Runs `function(replica, number, *args)`, which gives up between two batches once it is recalled.

        Args:
            function: What to run.
            make_args: Makes the arguments.
            on_wait: Called now and then; what it or `make_args` raises ends the loan.

        Returns:
            What it came to; None where the worker was lost or recalled.
        """
        try:
            packed = pack(function, False, None, (self._number, *make_args()))
            with self._lock:  # what is sent after the recall would change a member of the group
                if self.is_recalled:
                    return None
                self._call = self._worker.submit("on_packed", *packed)
            found = self._awaited(on_wait)
        except BaseException:
            self.recall()
            raise
        finally:
            self._has_ended = True
        self._relay.tell({"spare": notes_of(found)})
        is_left = self.is_recalled if not found.ok else found.value.value is None
        return None if is_left or _has_died(found) else found

    def _awaited(self, on_wait: Callable[[], None]) -> Outcome:
        while not self._platform.ready([self._call], _ROUND_S):
            on_wait()
            self._liveness.ask([self._worker], lambda worker: worker.submit("describe"))
            if self._liveness.poll().silent:
                self._worker.kill()
                self._platform.kill_process(self.standby_worker.info)
        return self._platform.outcome(-1, self._call)

    def recall(self) -> None:
        """From any thread: lets the call give up, and none begin."""
        with self._lock:
            self.is_recalled = True
            if self._call is not None:
                self._worker.submit("beside", replica.leave_call, self._number)

    @property
    def call(self) -> Any:
        """The call; None where none was begun."""
        return self._call

    @property
    def is_over(self) -> bool:
        """True if no call is running or will begin."""
        is_free = self._call is None or self._platform.outcome(-1, self._call).answered
        return is_free and (self._has_ended or self.is_recalled)

    @property
    def has_died(self) -> bool:
        """True if the worker died in its call."""
        return self._call is not None and _has_died(self._platform.outcome(-1, self._call))


def _has_died(found: Outcome) -> bool:
    return found.failure is not None and found.failure.kind == "died"
