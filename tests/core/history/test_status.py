"""How a trainer is doing, as data, as text, and as a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.shared.interface import Call, Capture, GroupEvent, GroupHistory
from raysgd.core.engine.shared.types import Heartbeat, SamplesUsed, WorkerInfo
from raysgd.core.history.status import TrainerStatus, find_straggler
from tests.helpers.fakes import no_snapshots, status_of

LEDGER = SamplesUsed(2, 100, 60, in_flight=8)
BEATS = {0: Heartbeat(3, 17, "training", 544, own_s=1.0, data=LEDGER), 1: Heartbeat(3, 17, "training", 540, own_s=2.0)}
INFOS = (WorkerInfo("a", "10.0.0.1", 11), WorkerInfo("b", "10.0.0.2", 12))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


class OnItsWay:
    """A transfer that does not arrive."""

    def result(self, timeout_s: float | None) -> Any:
        raise TimeoutError


def status(**changes: Any) -> TrainerStatus:
    history = GroupHistory(now=lambda: 0.0)
    history.record(GroupEvent("started", 0, 2, 1.0, "a new trainer"))
    values: dict[str, Any] = {"infos": INFOS, "heartbeats": BEATS, "samples_per_s": 1234.4, "history": history}
    return status_of(**{**values, **changes})


@pytest.mark.parametrize(
    ("own_s", "straggler"),
    [
        ([1.0, 1.0, 1.0], None),
        ([1.0, 1.1, 1.0], None),
        ([1.0, 1.0, 1.5], 2),
        ([5.0, 1.0], 0),
        ([1.0, None], None),
        ([1.0], None),
        ([], None),
    ],
)
def test_a_rank_straggles_when_its_own_work_takes_clearly_longer(own_s: list[float | None], straggler: int) -> None:
    assert find_straggler(own_s) == straggler


def test_a_rank_that_does_not_answer_is_shown_as_such() -> None:
    found = status(heartbeats={0: BEATS[0]})
    assert [(worker.heartbeat, worker.own_s) for worker in found.workers] == [(BEATS[0], 1.0), (None, None)]
    assert found.straggler is None
    assert "rank 1: 10.0.0.2, 12, no answer" in str(found)


def test_many_workers_are_shown_together_by_what_they_do_and_the_straggler_alone() -> None:
    def beat(rank: int) -> Heartbeat:
        phase = "training" if rank < 2000 else "validation"
        return Heartbeat(3, 17 + rank % 2, phase, own_s=9.0 if rank == 7 else 1.0 + rank % 2)

    found = status(
        infos=[WorkerInfo(f"node {rank // 8}", f"10.0.0.{rank // 8}", 100 + rank) for rank in range(2500)],
        heartbeats={rank: beat(rank) for rank in range(2500) if rank != 42},
    )
    found = replace(found, straggler=7)
    rows = [line.strip() for line in str(found).splitlines() if line.startswith("  rank")]
    assert rows == [
        "rank 0-6, 8-41, 43-1999: 250 nodes, 1998 processes, training, epoch 3, step 17 to 18, 1.00 to 2.00 s",
        "rank 7: 10.0.0.0, 107, training, epoch 3, step 18, 9.00 s",
        "rank 42: 10.0.0.5, 142, no answer, -",
        "rank 2000-2499: 63 nodes, 500 processes, validation, epoch 3, step 17 to 18, 1.00 to 2.00 s",
    ]
    assert "<td>2000-2499</td>" in found.as_card("a trainer")


def test_a_few_workers_are_shown_one_by_one() -> None:
    found = status(infos=[INFOS[0]] * 16, heartbeats=dict.fromkeys(range(16), BEATS[0]))
    assert str(found).count("\n  rank ") == 16


def test_a_prompt_shows_the_text() -> None:
    assert repr(status()) == str(status())


def test_the_text_says_what_there_is() -> None:
    text = str(status())
    for part in ("2 of 3, 1 spare", "1234 samples/s", "wait for rank 1", "epoch 3: 60 of 100 samples used", "step 17"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "running"),
        ({"heartbeats": {0: Heartbeat(), 1: Heartbeat(phase="between calls")}}, "idle"),
        ({"has_session_ended": True}, "ended"),
    ],
)
def test_the_state_is_one_word(changes: dict[str, Any], state: str) -> None:
    assert str(status(**changes)).splitlines()[0] == f"state:      {state}"


def test_the_text_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = str(status(num_spares=10**70))
    monkeypatch.setenv("COLUMNS", "60")
    found = replace(status(), global_batch=20 * "words ", failures=("x",))
    assert max(map(len, str(found).splitlines())) <= 60
    assert str(found).count("words") == 20
    assert max(map(len, wide.splitlines())) > 60


def test_a_global_batch_that_follows_the_number_of_workers_is_told() -> None:
    words = "2 workers x 32 samples: a global batch of 64"
    assert f"batch:      {words}\n" in str(replace(status(), global_batch=words))
    assert words in replace(status(), global_batch=words).as_card("a trainer")


def test_what_is_not_known_is_left_out() -> None:
    found = status(samples_per_s=None, heartbeats={0: Heartbeat(), 1: Heartbeat()})
    assert (found.straggler, found.data) == (None, None)
    assert "batch:" not in str(found)
    assert "not measured yet" in str(found)
    assert "samples used" not in str(found)


def test_the_data_are_told_by_whoever_answers() -> None:
    assert status().data == LEDGER
    assert status(heartbeats={1: BEATS[0]}).data == LEDGER


@pytest.mark.parametrize(
    ("ledger", "text"),
    [
        (LEDGER, "epoch 3: 60 of 100 samples used"),
        (SamplesUsed(0, None, 60), "epoch 1: 60 samples used"),
    ],
)
def test_a_ledger_says_what_is_known(ledger: SamplesUsed, text: str) -> None:
    assert str(ledger) == text


def test_losses_are_counted_by_how_they_ended() -> None:
    history = GroupHistory()
    history.record(GroupEvent("continued", 3, 2, 0.1, "lost rank 1", "no sample lost, 1 in flight are repeated"))
    history.record(GroupEvent("restored", 2, 2, 3.0, "lost rank 0, 1", "from the last completed call"))
    history.record(GroupEvent("restarted", 2, 2, 3.0, "the last workers were stopped", "from the last completed call"))
    history.record(GroupEvent("grown", 2, 3, 0.1, "there is room"))
    history.record(GroupEvent("lost", 3, 0, 0.2, "lost rank 2", "the last completed state is kept"))
    history.record(GroupEvent("ended", 3, 0, 0.2, "KeyboardInterrupt", "the last completed state is kept"))
    found = status(history=history)
    assert (found.num_failures, found.num_continued, found.num_restored, found.num_resizes) == (2, 1, 1, 4)
    assert found.failures == (
        "no sample lost, 1 in flight are repeated",
        "from the last completed call",
        "the last completed state is kept",
    )
    assert "2 failures: 1 continued in place, 1 restored" in str(found)
    assert "lost rank 0, 1; restarted all workers and resumed with 2 workers after 3.00 s" in str(found)


def test_the_age_and_place_of_the_snapshot_are_told() -> None:
    snapshots: Any = no_snapshots()
    assert status(snapshots=snapshots).snapshot is None
    snapshots.take_captures([Capture("rng", shared_state="state", progress=7)], group=None)
    found = status(snapshots=snapshots).snapshot
    assert found.is_inside
    assert found.age_s >= 0
    snapshots.completed(Call("call"))
    found = status(snapshots=snapshots).snapshot
    assert found.num_calls_since == 1
    assert "on its way" not in str(found)
    snapshots.begin_again()
    assert status(snapshots=snapshots).snapshot is None


def test_a_snapshot_that_only_workers_have_yet_is_told() -> None:
    snapshots: Any = no_snapshots()
    snapshots.take_captures([Capture("rng", shared_state="state")], group=None)
    snapshots.completed(Call("call"))
    snapshots.take_captures([Capture("rng", token=1)], SimpleNamespace(fetch=lambda *args: OnItsWay()))
    found = status(snapshots=snapshots)
    assert found.snapshot.has_newer
    assert "taken between calls, 1 call (0.0 s) since, a newer one is on its way" in str(found)


def test_the_card_shows_the_same_and_escapes_what_comes_from_outside() -> None:
    history = GroupHistory()
    history.record(GroupEvent("restored", 2, 2, 3.0, "<script>alert(1)</script>"))
    card = status(history=history)._repr_html_()
    assert "1234 samples/s" in card
    assert "<script>" not in card
    assert "&lt;script&gt;" in card
