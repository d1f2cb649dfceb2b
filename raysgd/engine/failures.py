"""Pure: what went wrong in a call, seen over all ranks, and how that is said."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from textwrap import shorten

from raysgd.engine.types import Failure, FailureKind, GroupReport
from raysgd.exceptions import WorkerFault

_REASON_LENGTH = 160
_BY_WEIGHT: tuple[FailureKind, ...] = ("died", "user", "disconnected")


@dataclass(frozen=True)
class Diagnosis:
    """The one cause that a failed call is put down to.

    Attributes:
        kind: "died" (a process or node is gone), "disconnected" (the group lost its connection although nobody is
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


def words(diagnosis: Diagnosis, gone: Collection[int] = ()) -> str:
    """The cause in a few words, for logs and messages; `gone` are all ranks that are lost, as far as that is known."""
    reason = _said(diagnosis.faults[0])
    if diagnosis.kind == "died":
        beside = f"; rank {diagnosis.beside[0].rank} raised {_said(diagnosis.beside[0])}" if diagnosis.beside else ""
        return f"lost rank {listed({*gone, *diagnosis.ranks})} ({reason}){beside}"
    lost = f"lost rank {listed(gone)}; " if gone else ""
    return f"{lost}lost the connection between ranks, says rank {listed(diagnosis.ranks)} ({reason})"


def _said(fault: WorkerFault) -> str:
    return f"{fault.type_name}: {shorten(fault.message.partition(chr(10))[0], _REASON_LENGTH, placeholder=' ...')}"


def listed(ranks: Collection[int]) -> str:
    """Ranks in order, for sentences."""
    return ", ".join(map(str, sorted(ranks)))


def _of_kind(failures: list[Failure], kind: str) -> tuple[WorkerFault, ...]:
    return tuple(failure.fault for failure in failures if failure.kind == kind)
