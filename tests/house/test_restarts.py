"""What the page says leads to a restart has a test that shows it, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fault-tolerance.md").read_text(encoding="utf-8")
CANNOT_GO_ON = "engine/test_recovery.py::test_where_survivors_cannot_go_on_new_workers_begin_the_call_again"

SHOWN_BY = {
    'with [`strategy="fsdp"`]': ["torch/parallel/test_fsdp_integration.py::test_a_lost_worker_is_replaced_and_nothing"],
    "with your own `train_epoch`": [
        "torch/test_torch_runner.py::test_what_cannot_be_gone_on_with_says_why",
        CANNOT_GO_ON,
    ],
    "with loaders that": [
        "torch/data/test_feed.py::test_nobody_knows_the_position_in_data_that_are_not_divided",
        "torch/data/test_feed.py::test_a_call_over_batches_that_the_driver_deals_cannot_go_on_in_them",
        "torch/test_data_of_call_integration.py::test_each_batch_of_a_batch_sampler_is_a_global",
        "torch/test_data_of_call_integration.py::test_an_order_that_the_user_draws_is_gone_on_with_if_a_new_worker",
        "torch/test_torch_trainer.py::test_the_driver_is_told_what_a_step_depends_on",
    ],
    "with Horovod": [
        "torch/test_horovod_integration.py::test_a_killed_worker_costs_a_call_or_less_and_no_result",
        "torch/parallel/test_ddp.py::test_what_a_new_group_would_lose_is_an_obstacle",
        "torch/parallel/test_ddp_hooks.py::test_a_communication_hook_that_remembers_something_is_an_obstacle",
    ],
    "when every survivor was in the middle": [
        "torch/test_chaos_faults_integration.py::test_a_step_of_two_optimizers_that_broke_off_half_way_is_not_gone_on",
    ],
    "when workers are lost again": [
        "engine/test_recovery.py::test_survivors_that_completed_no_step_are_replaced_at_the_next_loss",
    ],
    "in a call that changes the state": [
        "engine/test_recovery.py::test_a_call_that_changes_the_state_and_cannot_be_gone_on_with_needs_the",
    ],
    "when fewer than": ["engine/test_recovery.py::test_whoever_came_in_vain_is_sent_away_where_too_few_go_on"],
    "when the new group fails": [CANNOT_GO_ON],
}


def lines_of_page() -> list[str]:
    section = PAGE.partition("## When all workers restart instead\n")[2].partition("\n## ")[0]
    return [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]


def test_each_line_has_a_test() -> None:
    assert len(lines_of_page()) == len(SHOWN_BY)
    assert [line for line in lines_of_page() if not line.startswith(tuple(SHOWN_BY))] == []


@pytest.mark.parametrize("test", [test for tests in SHOWN_BY.values() for test in tests])
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / path).read_text(encoding="utf-8")
