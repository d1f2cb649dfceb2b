"""Pure: what went wrong in a call, seen over all ranks, and how that is said."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from textwrap import shorten

from raysgd._text.log_lines import listed, named
from raysgd.engine.shared.types import Failure, FailureKind, GroupReport
from raysgd.exceptions import WorkerFault

_REASON_LENGTH = 160
# What Ray says of a lost worker in a sentence, in two or three words.
_DEATHS = {
    "ActorDiedError": "its process died",
    "WorkerCrashedError": "its process died",
    "OutOfMemoryError": "killed, its node was out of memory",
    "NodeDiedError": "its node died",
    "ActorUnavailableError": "out of reach",
}
_OF_A_NODE = ("its node has died", "node it was running on is dead", "preemption")
_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")
_NO_MEMORY = ("out of memory", "DefaultCPUAllocator")
_BY_WEIGHT: tuple[FailureKind, ...] = ("died", "user", "disconnected")


@dataclass(frozen=True)
class Diagnosis:
    """The one cause that a failed call is put down to.

    Attributes:
        kind: "died" (a process or node is gone), "disconnected" (the group lost its connection although no rank is
            known to be dead) or "user" (an exception in user code).
        faults: The faults of that kind, in rank order.
        beside: Exceptions in user code that came with a death: perhaps because of it, so they are told, not raised.
    """

    kind: FailureKind
    faults: tuple[WorkerFault, ...]
    beside: tuple[WorkerFault, ...] = ()

    @property
    def ranks(self) -> list[int]:
        return [fault.rank for fault in self.faults]


def classify(report: GroupReport) -> Diagnosis:
    """Names the cause of a failed call.

    A death outranks everything, because the survivors' errors follow from it. A user exception outranks lost
    connections, which follow from the rank that stopped. Lost connections alone mean a peer that could not be reached.
    """
    failures = [outcome.failure for outcome in report.outcomes if outcome.failure is not None]
    assert failures, "classify() needs a report with at least one failure"
    for kind in _BY_WEIGHT:
        faults = _of_kind(failures, kind)
        if faults:
            return Diagnosis(kind, faults, _of_kind(failures, "user") if kind == "died" else ())
    raise AssertionError("unreachable: every failure has a known kind")


def failed_alike(report: GroupReport) -> bool:
    """Return whether every rank failed, and at the same line of user code."""
    failures = [outcome.failure for outcome in report.outcomes]
    places = {(failure.fault.type_name, failure.fault.location) for failure in failures if failure is not None}
    return None not in failures and len(places) == 1


def is_lack_of_memory(diagnosis: Diagnosis) -> bool:
    """Return whether memory ran out on each rank that failed, on a device or on its node, and the processes live."""
    return diagnosis.kind == "user" and all(_lacks_memory(fault) for fault in diagnosis.faults)


def _lacks_memory(fault: WorkerFault) -> bool:
    """Return whether an exception says so. PyTorch raises a `RuntimeError`; TensorFlow has one class for it."""
    if isinstance(fault.error, MemoryError) or fault.type_name in _OF_MEMORY:
        return True
    is_runtime_error = isinstance(fault.error, RuntimeError) or fault.type_name == "RuntimeError"
    return is_runtime_error and any(phrase in fault.message for phrase in _NO_MEMORY)


def words(diagnosis: Diagnosis, gone: Collection[int] = ()) -> str:
    """The cause in a few words, for logs and messages; `gone` are all ranks that are lost, as far as that is known."""
    reason = _said(diagnosis.faults[0])
    if diagnosis.kind == "died":
        beside = f"; rank {diagnosis.beside[0].rank} raised {_said(diagnosis.beside[0])}" if diagnosis.beside else ""
        return f"lost rank {listed({*gone, *diagnosis.ranks})} ({reason}){beside}"
    if diagnosis.kind == "user":
        return f"rank {listed(diagnosis.ranks)} raised {reason}"
    lost = f"lost rank {listed(gone)}; " if gone else ""
    verb = "reports" if len(diagnosis.ranks) == 1 else "report"
    return f"{lost}{named(diagnosis.ranks)} {verb}: connection to another rank lost ({reason})"


def _said(fault: WorkerFault) -> str:
    if fault.type_name in _DEATHS:
        is_of_node = any(phrase in str(fault.error) for phrase in _OF_A_NODE)
        return _DEATHS["NodeDiedError" if is_of_node else fault.type_name]
    return f"{fault.type_name}: {shorten(fault.message.partition(chr(10))[0], _REASON_LENGTH, placeholder=' ...')}"


def _of_kind(failures: list[Failure], kind: str) -> tuple[WorkerFault, ...]:
    return tuple(failure.fault for failure in failures if failure.kind == kind)
