from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.engine.processes.resources import explain, impossibility
from raysgd.engine.shared.types import ClusterView, NodeView, PlacementGroupHolder, Resources

NEED = Resources(num_cpus=2)


def node(free: float, total: float = 8, name: str = "1") -> NodeView:
    return NodeView(name, f"10.0.0.{name}", {"CPU": total}, {"CPU": free})


def test_the_table_says_what_was_asked_what_there_is_and_what_holds_it() -> None:
    bundles = ({"CPU": 3.0}, *[{"CPU": 0.001}] * 1000)
    view = ClusterView((node(1), node(8, name="2")), (PlacementGroupHolder("tune", "CREATED", bundles),))
    assert explain(NEED, 5, view).splitlines() == [
        "  requested:  5 x {'CPU': 2.0}",
        "  node 10.0.0.1:  free {'CPU': 1} of {'CPU': 8}",
        "  node 10.0.0.2:  free {'CPU': 8} of {'CPU': 8}",
        "  held by placement group tune (CREATED):  1 x {'CPU': 3.0}, 1000 x {'CPU': 0.001}",
        "  held by other tasks and actors:  3 CPU",
    ]


@pytest.mark.parametrize("state", ["PENDING", "RESCHEDULING"])
def test_a_group_that_waits_for_resources_does_not_hold_them(state: str) -> None:
    view = ClusterView((node(6),), (PlacementGroupHolder("other", state, ({"CPU": 99.0},)),))
    lines = explain(NEED, 1, view).splitlines()
    assert lines[2:] == [
        f"  waited for by placement group other ({state}):  1 x {{'CPU': 99.0}}",
        "  held by other tasks and actors:  2 CPU",
    ]


def test_nothing_is_said_of_others_when_everything_is_accounted_for() -> None:
    view = ClusterView((node(4),), (PlacementGroupHolder("own", "CREATED", ({"CPU": 4.0},)),))
    assert "other tasks" not in explain(NEED, 1, view)


def test_an_empty_cluster_is_told_as_such() -> None:
    assert explain(NEED, 1, ClusterView(())) == "  requested:  1 x {'CPU': 2.0}"


def test_who_asks_for_gpus_that_no_node_has_is_told_how_to_do_without() -> None:
    need, gpu_node = Resources(num_cpus=1, num_gpus=1), NodeView("2", "10.0.0.2", {"CPU": 8, "GPU": 1}, {"CPU": 8})
    advice = "No node has a GPU. To train on CPUs pass `use_gpu=False`."
    assert explain(need, 2, ClusterView((node(8),))).endswith(advice)
    assert advice in str(impossibility(need, 2, ClusterView((node(8),))))
    assert advice not in explain(need, 2, ClusterView((node(8), gpu_node)))
    assert advice not in explain(NEED, 2, ClusterView((node(8),)))


@pytest.mark.parametrize(
    ("token", "mode", "taken"), [(True, None, "token"), (True, "disabled", "disabled"), (False, None, "")]
)
def test_a_token_is_used_where_there_is_one_and_no_mode_is_set(
    token: bool, mode: str | None, taken: str, tmp_path: Path
) -> None:
    """As `ray start --head` uses it, so that what runs beside it is let in."""
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("c0ffee" * 6)
    names = [name for name in os.environ if name.startswith("RAY_AUTH")]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    program = "import os; from raysgd.engine.processes import resources; resources._use_token()\n"
    program += "print(os.environ.get('RAY_AUTH_MODE', ''))"
    given = {**environment, "HOME": str(tmp_path), **({} if mode is None else {"RAY_AUTH_MODE": mode})}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == taken


@pytest.mark.parametrize(
    ("nodes", "num_workers", "reason"),
    [
        ((node(0), node(0, name="2")), 8, None),
        ((node(8), node(8, total=9, name="2")), 9, "The nodes have room for 8 workers at most, even when nothing else"),
        ((node(1, total=1), node(1, total=1, name="2")), 1, "No node is large enough for a worker, even when nothing"),
        ((), 1, "No node is large enough"),
    ],
)
def test_what_no_node_can_ever_hold_is_known_from_its_total(
    nodes: tuple[NodeView, ...], num_workers: int, reason: str | None
) -> None:
    found = impossibility(NEED, num_workers, ClusterView(nodes))
    if reason is None or found is None:
        assert found == reason
    else:
        assert found.startswith(reason)
        assert explain(NEED, num_workers, ClusterView(nodes)) in found
