from __future__ import annotations

from dataclasses import replace

import pytest

from raysgd.engine.decisions.failures import classify, failed_alike, is_lack_of_memory, words
from raysgd.engine.shared.types import Failure, FailureKind, GroupReport, Outcome
from tests.helpers.fakes import failure, fault


def report(*kinds: FailureKind | None) -> GroupReport:
    return GroupReport(
        tuple(Outcome(rank, failure=failure(kind, rank) if kind else None) for rank, kind in enumerate(kinds))
    )


@pytest.mark.parametrize(
    ("kinds", "expected", "ranks"),
    [
        ((None, "died"), "died", [1]),
        (("died", "died", None), "died", [0, 1]),
        (("disconnected", "died"), "died", [1]),
        (("user", "died", "disconnected"), "died", [1]),
        (("user", None), "user", [0]),
        (("disconnected", "user", "user"), "user", [1, 2]),
        (("disconnected", None, "disconnected"), "disconnected", [0, 2]),
    ],
)
def test_a_death_outranks_an_exception_and_that_a_lost_connection(
    kinds: tuple[FailureKind | None, ...], expected: FailureKind, ranks: list[int]
) -> None:
    diagnosis = classify(report(*kinds))
    assert (diagnosis.kind, diagnosis.ranks) == (expected, ranks)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("a.py:7", "a.py:7"), True),
        (("a.py:7", "a.py:9"), False),
        (("a.py:7", None), False),
        ((None, "a.py:7"), False),
        (("a.py:7",), True),
    ],
)
def test_ranks_failed_alike_if_all_of_them_raised_at_the_same_line(
    places: tuple[str | None, ...], expected: bool
) -> None:
    failures = [place and Failure("user", fault(rank, location=place)) for rank, place in enumerate(places)]
    outcomes = tuple(Outcome(rank, failure=found or None) for rank, found in enumerate(failures))
    assert failed_alike(GroupReport(outcomes)) == expected


class OutOfMemoryError(RuntimeError):
    """As PyTorch's, for devices."""


class ResourceExhaustedError(Exception):
    """As TensorFlow's."""


ON_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([MemoryError()], True),
        ([type("_ArrayMemoryError", (MemoryError,), {})("Unable to allocate 8 TiB")], True),
        ([OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")], True),
        ([RuntimeError("CUDA error: out of memory")], True),
        ([RuntimeError(ON_CPU)], True),
        ([ResourceExhaustedError("OOM when allocating tensor")], True),
        ([MemoryError(), RuntimeError(ON_CPU)], True),
        ([MemoryError(), ValueError("out of range")], False),
        ([RuntimeError("the database is out of reach")], False),
        ([ValueError("out of memory")], False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_exceptions(errors: list[Exception], expected: bool) -> None:
    outcomes = [Outcome(rank, failure=failure("user", rank, error)) for rank, error in enumerate(errors)]
    assert is_lack_of_memory(classify(GroupReport(tuple(outcomes)))) is expected


def test_a_lack_of_memory_is_seen_where_the_exception_could_not_travel_and_not_beside_a_death() -> None:
    unknown = Failure("user", replace(fault(0), error=None, type_name="OutOfMemoryError"))
    text_only = Failure("user", replace(fault(1), error=None, type_name="RuntimeError", message=ON_CPU))
    both = tuple(Outcome(rank, failure=each) for rank, each in enumerate((unknown, text_only)))
    assert is_lack_of_memory(classify(GroupReport(both)))
    dead = Outcome(2, failure=failure("died", 2))
    assert not is_lack_of_memory(classify(GroupReport((*both, dead))))


def test_ranks_that_raised_different_exceptions_at_one_line_did_not_fail_alike() -> None:
    errors = [KeyError("x"), ValueError("x")]
    outcomes = [Outcome(rank, failure=failure("user", rank, error)) for rank, error in enumerate(errors)]
    assert not failed_alike(GroupReport(tuple(outcomes)))


def test_silence_is_no_cause() -> None:
    silent = Outcome(0, answered=False)
    diagnosis = classify(GroupReport((silent, Outcome(1, failure=failure("user", 1)))))
    assert diagnosis.ranks == [1]


def test_a_report_without_failures_cannot_be_classified() -> None:
    with pytest.raises(AssertionError, match="at least one failure"):
        classify(report(None, None))


def test_an_exception_beside_a_death_is_told_with_it() -> None:
    outcomes = [
        Outcome(0, failure=Failure("user", fault(0, ValueError("bad\nbatch")))),
        Outcome(1, failure=Failure("died", fault(1))),
    ]
    diagnosis = classify(GroupReport(tuple(outcomes)))
    assert diagnosis.kind == "died"
    assert words(diagnosis) == "lost rank 1 (RuntimeError: broken); rank 0 raised ValueError: bad"


@pytest.mark.parametrize(
    ("type_name", "text", "expected"),
    [
        ("ActorDiedError", "The actor died unexpectedly before finishing this task.", "its process died"),
        ("ActorDiedError", "The actor died.\n The actor is dead because its node has died.", "its node died"),
        ("OutOfMemoryError", "Task was killed due to the node running low on memory.", "killed, its node was out of"),
        ("ActorUnavailableError", "The actor is temporarily unavailable", "out of reach"),
    ],
)
def test_a_death_is_named_in_a_few_words(type_name: str, text: str, expected: str) -> None:
    died = replace(fault(1, RuntimeError(text)), type_name=type_name)
    outcomes = (Outcome(0), Outcome(1, failure=Failure("died", died)))
    assert words(classify(GroupReport(outcomes))).startswith(f"lost rank 1 ({expected}")


@pytest.mark.parametrize(
    ("kinds", "who"),
    [(("disconnected", None), "rank 0 reports"), (("disconnected", "disconnected"), "ranks 0, 1 report")],
)
def test_those_who_lost_a_connection_report_it(kinds: tuple[FailureKind | None, ...], who: str) -> None:
    assert words(classify(report(*kinds))).startswith(f"{who}: connection to another rank lost (")
