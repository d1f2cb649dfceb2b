"""What the driver sees and tells while a call runs. Whom it ends, and where calls stop, `tests/simulator` checks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raysgd.core.engine.gathering import LivenessCheck
from raysgd.core.engine.group import GroupHooks, WorkerGroup
from raysgd.core.engine.monitor import shown_together
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.history.status import glance
from raysgd.exceptions import WorkersLostError
from tests.core.engine.trainer import Trainer, befalls, dies
from tests.simulator.processes import Process
from tests.simulator.replica import SimReplica

# -------------------------------------------------------------------------------------------- signs of life


def run_waiting(trainer: Trainer, num_steps: int, on_wait: Callable[[], None]) -> None:
    trainer.controller.run(replace(trainer.walking(num_steps), on_wait=on_wait))


@pytest.mark.parametrize(("num_workers", "first_s"), [(3, 0.2), (20, 0.2), (32, 1.0)])
def test_few_workers_are_asked_soon_and_many_only_after_a_round(num_workers: int, first_s: float) -> None:
    trainer = Trainer(num_workers=num_workers, nodes=(num_workers,), heartbeat_s=30.0).started()
    began, heard_at = trainer.kernel.now, list[float]()

    def note() -> None:
        if trainer.controller.monitor.is_on and trainer.controller.monitor.heartbeats:
            heard_at.append(trainer.kernel.now - began)

    run_waiting(trainer, 20, note)
    assert first_s < heard_at[0] < first_s + 0.4
    assert not trainer.controller.monitor.is_on


@pytest.mark.parametrize(("snapshots_inside", "num_rounds"), [(True, 28), (False, 8)])
def test_ranks_that_copy_inside_the_call_are_asked_four_times_a_second(
    snapshots_inside: bool, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, asked = Trainer(spec={"snapshots_inside": snapshots_inside}).started(), list[float]()
    heartbeat = SimReplica.heartbeat

    def noted(replica: SimReplica) -> Heartbeat:
        asked.extend([trainer.kernel.now] if replica.world.rank == 0 else [])
        return heartbeat(replica)

    monkeypatch.setattr(SimReplica, "heartbeat", noted)
    trainer.walk(60)
    assert sum(1.0 < at - asked[0] < 9.0 for at in asked) == pytest.approx(num_rounds, abs=2)


@pytest.mark.parametrize("ranks", [(1,), (1, 2, 3, 4)])
def test_ranks_that_are_silent_for_too_long_are_ended_and_everything_told(
    ranks: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(num_workers=6, nodes=(6,), tells=False).started()
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        assert trainer.walk(60, befalls(Process.freeze, *ranks, nth=[20])) == [60] * 6
    event = next(event for event in trainer.controller.history.events if event.kind == "hung")
    assert event.cause == f"{'rank 1' if len(ranks) == 1 else 'ranks 1-4'} did not respond for 5 s"
    text = caplog.records[0].getMessage()
    assert text.startswith(f"{event.cause}\n")
    assert ", training\n  a stack" in text
    assert text.count("  no answer") == 1
    assert f"{event.cause.partition(' did')[0]}: epoch 0, step " in text


def test_of_many_ranks_those_are_told_of_that_are_unlike_the_others() -> None:
    alike = {"training": list(range(990)), **{f"elsewhere {number}": [990 + number] for number in range(10)}}
    lines = shown_together(alike).splitlines()
    assert lines[0] == "rank 990: elsewhere 0"
    assert lines[-1] == "992 other ranks are elsewhere"
    assert len(lines) == 9
    assert shown_together({"training": [0, 2], "validating": [1]}) == "ranks 0, 2: training\nrank 1: validating"


@pytest.mark.parametrize(
    ("num_workers", "heartbeat_s", "wanted_s", "expected"),
    [
        (2, 30.0, 1.0, 1.0),
        (2, 2.1, 1.0, 0.7),
        (2, 30.0, 0.25, 0.25),
        (1000, 30.0, 1.0, 10.0),
        (2000, 30.0, 1.0, 10.0),
        (1000, 60.0, 1.0, 10.0),
        (1000, 60.0, 0.25, 10.0),
    ],
)
def test_many_ranks_are_asked_less_often_but_several_times_before_they_count_as_lost(
    num_workers: int, heartbeat_s: float, wanted_s: float, expected: float
) -> None:
    assert LivenessCheck(Platform(), heartbeat_s).round_s(num_workers, wanted_s) == pytest.approx(expected)


# -------------------------------------------------------------------------------------------- numbers


def tell_samples(monkeypatch: pytest.MonkeyPatch, samples_per_s: int, phase: str) -> None:
    """Lets every rank tell of so many samples a second, on a clock of its own."""

    def heartbeat(replica: SimReplica) -> Heartbeat:
        now = replica.around.now()
        num_samples = int(now * samples_per_s)
        return Heartbeat(0, 1, phase, num_samples=num_samples, own_s=2.0, at=now + replica.world.rank)

    monkeypatch.setattr(SimReplica, "heartbeat", heartbeat)


@pytest.mark.parametrize(
    ("samples_per_s", "phase", "present"), [(1000, "training", 3000.0), (0, "training", 7.0), (1000, "validating", 7.0)]
)
def test_while_a_call_counts_samples_its_own_throughput_is_told_and_the_last_ones_otherwise(
    samples_per_s: int, phase: str, present: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, told = Trainer().started(), list[Any]()
    tell_samples(monkeypatch, samples_per_s, phase)
    last = {0: Heartbeat(own_s=9.0)}
    trainer.controller.monitor.observer = lambda: told.append(glance(trainer.controller, last, 7.0))
    trainer.walk(40)
    assert told[0].samples_per_s == 7.0, "it takes two moments"
    assert told[-1].samples_per_s == pytest.approx(present, rel=0.01)
    assert told[0].workers[0].own_s == 9.0
    assert told[-1].workers[0].own_s == (2.0 if phase == "training" else 9.0)
    after = glance(trainer.controller, last, 7.0)
    assert (after.samples_per_s, after.workers[0].own_s) == (7.0, 9.0)


def test_the_status_names_the_state_of_a_recovery_while_it_runs() -> None:
    told = list[Any]()

    class Looking(GroupHooks):
        def on_change(self, group: WorkerGroup) -> None:
            told.append(glance(trainer.controller, {}, None))

    trainer = Trainer(hooks=Looking()).started()
    trainer.walk(10, dies(1))
    assert [each.recovery for each in told] == ["Regrouping"]
    assert str(told[0]).splitlines()[0] == "state:      recovering (Regrouping)"
    assert glance(trainer.controller, {}, None).recovery == ""


def test_whoever_looks_hears_of_a_call_that_failed_for_good() -> None:
    trainer = Trainer().started()
    kinds: list[str] = []
    trainer.controller.monitor.observer = lambda: kinds.append(trainer.controller.history.events[-1].kind)
    with pytest.raises(WorkersLostError):
        trainer.walk(5, dies(1), max_retries=0)
    assert kinds[-1] == "lost"


# -------------------------------------------------------------------------------------------- holding


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were asked to stop."""
    ranks: list[int] = []
    propose_hold = SimReplica.propose_hold

    def noted(replica: SimReplica, *args: Any) -> int | None:
        ranks.append(replica.world.rank)
        return propose_hold(replica, *args)

    monkeypatch.setattr(SimReplica, "propose_hold", noted)
    monkeypatch.setattr(SimReplica, "hold", lambda replica: ranks.append(replica.world.rank), raising=False)
    return ranks


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ({"nodes": (4,), "num_spares": 1, "resize_interval_s": 1.0}, None),
        ({"nodes": (3, 1)}, "n1"),
        ({"nodes": (3,)}, "n0"),
        ({"nodes": (1, 2), "use_local": True}, "n0"),
    ],
    ids=["a full group with a spare", "no worker is there", "no worker would be left", "the driver is there"],
)
def test_a_call_is_not_held_where_nobody_can_come_or_leave(
    options: dict[str, Any], leaves: str | None, asked: list[int]
) -> None:
    trainer = Trainer(**options).started()
    if leaves is not None:
        trainer.kernel.after(3.0, lambda: setattr(trainer.cluster.nodes[leaves], "is_leaving", True))
    assert trainer.walk(60) == [60] * 3
    assert trainer.walk(1) == [61] * 3
    assert (asked, trainer.kinds) == ([], [])


def rest(replica: SimReplica) -> Any:
    """A call that cannot be gone on with in another group."""
    yield 8.0


def test_a_call_that_cannot_be_gone_on_with_is_not_held(asked: list[int]) -> None:
    trainer = Trainer(nodes=(2, 1)).started()
    trainer.kernel.after(1.0, lambda: setattr(trainer.cluster.nodes["n1"], "is_leaving", True))
    trainer.controller.run(Call(rest, changes_state=True))
    assert (asked, trainer.kinds) == ([], [])


def test_a_step_that_a_rank_is_past_is_given_up_by_all_and_a_later_one_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposed: list[tuple[int, int]] = []
    propose_hold = SimReplica.propose_hold

    def refuse_some(replica: SimReplica, number: int, margin: int, at: int | None) -> int | None:
        step = propose_hold(replica, number, margin, at)
        proposed.append((margin, replica.world.rank))
        return None if proposed[-1] in [(2, 1), (4, 0)] else step

    monkeypatch.setattr(SimReplica, "propose_hold", refuse_some)
    trainer = Trainer(nodes=(2, 1)).started()
    leave = befalls(lambda process: setattr(trainer.cluster.nodes["n1"], "is_leaving", True), 0)
    assert trainer.walk(60, leave) == [60] * 2
    assert sorted(proposed) == [(2, 0), (2, 1), (2, 2), (4, 0), (8, 0), (8, 1), (8, 2)]
    assert trainer.kinds == ["left"]


def test_a_call_is_not_held_for_a_worker_that_does_not_answer_any_more(asked: list[int]) -> None:
    trainer = Trainer(num_workers=4, nodes=(4,), resize_interval_s=60.0).started()
    ready: list[Process] = []

    def load_in_vain(process: Process) -> None:
        process.load(is_endless=False)
        trainer.kernel.after(8.0, ready[0].freeze)
        trainer.kernel.after(9.0, lambda: process.die(0.01))

    coming = [befalls(act, -1, at="prepare", nth=[n]) for n, act in ((1, ready.append), (2, load_in_vain))]
    assert trainer.walk(60, befalls(trainer.lose(1, 2), 1), *coming) == [60] * 2
    assert (asked, trainer.kinds) == ([], ["continued"])


def test_a_call_is_held_once_for_all_who_are_coming() -> None:
    trainer = Trainer(num_workers=4, nodes=(4,), resize_interval_s=1.0).started()
    assert trainer.walk(150, befalls(trainer.lose(1, 2), 1), *trainer.starting(3.0, 12.0)) == [150] * 4
    assert trainer.kinds == ["continued", "grown"]


def test_a_call_waits_for_no_spares_where_enough_workers_are_ready() -> None:
    trainer = Trainer(num_workers=2, nodes=(4,), num_spares=2, resize_interval_s=1.0).started()
    trainer.kernel.sleep(5.0)
    trainer.walk(2)
    trainer.walk(150, befalls(trainer.lose_but_first, 0), *trainer.starting(3.0, 300.0))
    assert (trainer.kinds, len(trainer.group)) == (["continued", "grown"], 2)


@pytest.mark.parametrize(("resize_interval_s", "kinds"), [(1.0, ["continued", "grown"]), (None, ["continued"])])
def test_a_running_call_grows_only_where_it_is_told_to_look(resize_interval_s: Any, kinds: list[str]) -> None:
    trainer = Trainer(nodes=(2, 1), resize_interval_s=resize_interval_s).started()
    trainer.kernel.after(8.0, lambda: trainer.add_node(1))
    trainer.walk(200, befalls(trainer.lose_node("n1"), 2))
    assert trainer.kinds == kinds


# -------------------------------------------------------------------------------------------- snapshots


def test_a_part_that_is_not_kept_any_more_makes_no_snapshot_and_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(continues=False, snapshot_every=1).started()
    monkeypatch.setattr(SimReplica, "part_of_snapshot", lambda replica, number: None)
    assert trainer.walk(40, dies(0, nth=[30])) == [40] * 3
    assert trainer.controller.history.events[-1].detail == "from the last completed call"
    assert caplog.text.count("a larger `snapshot_every_n_steps`") == 1


def test_a_snapshot_on_its_way_lands_while_a_call_runs_and_is_not_overtaken() -> None:
    trainer = Trainer(is_large=True, snapshot_every=1).started()
    trainer.controller.snapshot()
    sending = befalls(trainer.load_for(3.0), 0, at="send", nth=[1])
    trainer.note(1, sending)
    seen: list[tuple[bool, bool]] = []
    snapshots = trainer.controller.snapshots
    run_waiting(trainer, 60, lambda: seen.append((snapshots.is_coming, snapshots.is_inside)))
    assert seen[0] == (True, False)
    assert (False, False) in seen
    assert seen[-1][1], "another one from inside comes after it"
