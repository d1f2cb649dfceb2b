"""A thousand workers and more: what the driver sends to each does not grow with their number, and nobody is ended."""

from __future__ import annotations

import pytest

from tests.scale.crowd import SPARE_ROOM, Crowd, Sent
from tests.simulator.schedule import Fault

MANY, MORE, FEW = 1000, 2500, 100
ADDRESS_BYTES = 60  # of one rank, in what tells each of them where all are

ONE_EACH = {
    "start": {"prepare": 1.0, "open_endpoint": 1.0, "build": 1.0},
    "call": {"on_packed": 1.0},
    "loss": {"interrupt": 1.0, "leave_group": 1.0, "regroup": 1.0, "on_packed": 2.0},
    "growth": {"leave_group": 1.0, "regroup": 1.0, "on_packed": 2.0},
    "load": {"on_packed": 1.0},
    "restart": {"prepare": 1.0, "open_endpoint": 1.0, "build": 1.0, "on_packed": 2.0},
}
"""Messages to each worker.

Who leaves a group listens for the next one at once, and is not asked to. Before a group grows, its workers are asked
whether they can go on in another one.
"""


def story(num_workers: int, num_stalled: int = 0) -> tuple[Crowd, dict[str, Sent]]:
    """A start, a call, one in which a worker dies, one before which another one steps in, a file, and new workers."""
    in_second_step = Fault("die", "step", num_workers + num_workers // 2)
    crowd = Crowd(num_workers, (in_second_step,), num_stalled)
    sent = {"start": crowd.does("start"), "call": crowd.does("steps", 1)}
    sent |= {"loss": crowd.does("steps", 1), "growth": crowd.does("steps", 1)}
    crowd.does("save")
    sent["load"] = crowd.does("load", 1)
    assert crowd.killed_alive == []
    crowd.does("kill")
    return crowd, {**sent, "restart": crowd.does("steps", 1)}


def check(crowd: Crowd, sent: dict[str, Sent], num_workers: int) -> None:
    assert crowd.events == ["started", "continued", "grown", "restarted"]
    assert crowd.controller.num_workers == num_workers
    for name, wanted in ONE_EACH.items():
        found = sent[name].most_each(num_workers)
        assert {method: found.get(method, 0) for method in wanted} == pytest.approx(wanted, abs=0.05), name
        assert sum(found.values()) == pytest.approx(sum(wanted.values()), abs=0.1), name
    for name, method in (("start", "build"), ("loss", "regroup"), ("growth", "regroup")):
        assert sent[name].bytes_each(method) < 1000 + ADDRESS_BYTES * num_workers
    for name in ("call", "load", "restart"):  # no rank gets the random states of another one
        assert sent[name].bytes_each("on_packed") < 1000


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [FEW, MANY])
def test_what_each_worker_is_sent_does_not_depend_on_how_many_there_are(num_workers: int) -> None:
    crowd, sent = story(num_workers)
    check(crowd, sent, num_workers)


@pytest.mark.long
def test_new_workers_that_go_on_inside_a_call_get_the_progress_of_no_other() -> None:
    in_20th_step = Fault("die", "step", 19 * FEW + 1)
    crowd = Crowd(FEW, (in_20th_step,), continues=False, regroups=False, snapshot_every=1)
    crowd.does("start")
    sent = crowd.does("steps", 24)
    [_, restored] = crowd.controller.history.events
    assert (restored.kind, restored.detail[:23]) == ("restored", "from a snapshot inside ")
    assert sent.bytes_each("on_packed") < 1000


@pytest.mark.soak
@pytest.mark.parametrize("num_stalled", [0, MORE // 3, MORE - 1])
def test_no_live_worker_of_thousands_is_ended_after_a_loss_also_where_they_stand_still_for_seconds(
    num_stalled: int,
) -> None:
    crowd, sent = story(MORE, num_stalled)
    assert crowd.events[:3] == ["started", "continued", "grown"]
    assert crowd.controller.num_workers == MORE
    assert sent["loss"].messages["interrupt"] <= MORE


@pytest.mark.soak
def test_a_quarter_of_a_thousand_workers_goes_with_its_node_and_no_other_is_ended() -> None:
    crowd = Crowd(MANY, (Fault("lose node", "step", MANY + MANY // 2),))
    crowd.does("start")
    crowd.does("steps", 1)
    crowd.does("steps", 1)
    assert crowd.killed_alive == []
    assert crowd.events[1] == "continued"
    assert MANY * 3 // 4 - SPARE_ROOM <= crowd.controller.num_workers < MANY
