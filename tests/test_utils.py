from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raysgd import utils
from raysgd.utils import check_for_failure


def test_the_names_of_special_keys_are_those_of_existing_code() -> None:
    assert (utils.BATCH_COUNT, utils.NUM_SAMPLES, utils.BATCH_SIZE) == (
        "batch_count",
        "num_samples",
        "*batch_size",
    )


def test_every_public_name_is_there() -> None:
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []


def test_override_returns_the_method_itself() -> None:
    def keys() -> None: ...

    assert utils.override(dict)(keys) is keys


def test_override_refuses_a_name_that_the_interface_lacks() -> None:
    with pytest.raises(AssertionError, match="`kees` overrides nothing: `dict` has no such attribute"):

        class Misspelt(dict[str, int]):
            @utils.override(dict)
            def kees(self) -> None: ...


def test_a_free_port_can_be_bound() -> None:
    port = utils.find_free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname()[1] == port


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


@pytest.mark.integration
def test_true_when_all_succeed(worker: Any) -> None:
    assert check_for_failure([worker.work.remote() for _ in range(3)]) is True


@pytest.mark.integration
def test_true_when_there_is_nothing_to_wait_for(ray_cluster: None) -> None:
    assert check_for_failure([]) is True


@pytest.mark.integration
def test_false_when_a_worker_dies_and_the_death_is_logged(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert check_for_failure([worker.work.remote(), worker.die.remote()]) is False
    assert "a worker died" in caplog.text


@pytest.mark.integration
def test_an_error_of_the_task_is_raised_as_it_is(worker: Any) -> None:
    with pytest.raises(KeyError, match="mistake"):
        check_for_failure([worker.work.remote(), worker.fail.remote()])
