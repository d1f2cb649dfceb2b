from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raysgd.utils import check_for_failure

pytestmark = pytest.mark.integration


class Worker:
    def work(self) -> int:
        return 1

    def fail(self) -> None:
        raise KeyError("mistake")

    def die(self) -> None:
        os._exit(1)


@pytest.fixture
def worker(ray_cluster: None) -> Iterator[Any]:
    actor: Any = ray.remote(num_cpus=0)(Worker).remote()
    yield actor
    ray.kill(actor)


def test_true_when_all_succeed(worker: Any) -> None:
    assert check_for_failure([worker.work.remote() for _ in range(3)]) is True


def test_true_when_there_is_nothing_to_wait_for(ray_cluster: None) -> None:
    assert check_for_failure([]) is True


def test_false_when_a_worker_dies_and_the_death_is_logged(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert check_for_failure([worker.work.remote(), worker.die.remote()]) is False
    assert "a worker died" in caplog.text


def test_an_error_of_the_task_is_raised_as_it_is(worker: Any) -> None:
    with pytest.raises(KeyError, match="mistake"):
        check_for_failure([worker.work.remote(), worker.fail.remote()])
