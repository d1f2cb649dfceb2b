"""Programs of users give the numbers of one process, or are refused: a few, and more of each kind under `make soak`."""

from __future__ import annotations

import pytest

from tests.helpers.forked import SWITCH
from tests.helpers.run_if import RunIf
from tests.helpers.stories import run_story
from tests.programs.kinds import KINDS
from tests.programs.running import EQUAL, Runner

pytestmark = pytest.mark.integration

NUM_PROGRAMS = 30


def test_two_workers_of_which_one_is_lost_give_the_numbers_of_one_process(ray_cluster: None) -> None:
    verdict = Runner("counts").run("workers=2 kill=1@1 rows=22 batch=5 task=ignored accumulate=2 sampler=turns clip=1")
    assert (verdict.word, verdict.reason, verdict.is_killed) == (EQUAL, "", True)


@RunIf(modules=("lightning", "torchmetrics", "pyarrow"))
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_no_program_is_wrong_and_few_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.delenv(SWITCH, raising=False)  # hundreds of workers start
    options = ("--programs", str(NUM_PROGRAMS), "--processes", "2")
    print(run_story("tests.programs", "--kind", kind, *options, timeout_s=7000).stdout)


def test_an_own_step_clips_as_in_one_process_and_a_function_counts_its_labels(ray_cluster: None) -> None:
    program = "workers=2 rows=22 batch=5 task=ignored step=own micro=2 accumulate=2 criterion=function rung=clip"
    verdict = Runner("counts").run(program)
    assert (verdict.word, verdict.reason) == (EQUAL, "")


def test_a_class_that_changes_the_rate_keeps_it_where_a_worker_steps_in(ray_cluster: None) -> None:
    verdict = Runner("schedulers").run("workers=2 kill=1@0 change=reload")
    assert (verdict.word, verdict.reason, verdict.is_killed) == (EQUAL, "", True)
