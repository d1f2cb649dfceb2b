"""What users of functions read when something goes wrong: advice that holds for functions."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.exceptions import TrainerShutdownError, UnpicklableError, WorkersLostError
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig
from raysgd.train.executor import BackendExecutor
from tests.helpers.fakes import CountingReplica, FakeClock, FakeCluster, Lost, NullConnection, ShutDown, Stopper, read


def controller(cluster: FakeCluster) -> ElasticController:
    """The controller of a function trainer, over a fake cluster."""
    executor = BackendExecutor(BackendConfig(), 2)
    spec = replace(executor._spec, connection=NullConnection(), make_replica=CountingReplica)
    made = ElasticController(
        spec, executor._scaling, make_group=cluster.make_group, view=cluster.view, clock=FakeClock().as_clock()
    )
    made.start()
    return made


def test_a_loss_too_many_names_the_checkpoint() -> None:
    cluster = FakeCluster(calls=deque([Lost((1,))]))
    with pytest.raises(WorkersLostError) as caught:
        controller(cluster).run(Call(read), max_retries=0)
    assert "to continue, pass `latest_checkpoint` to the next run as `checkpoint`" in str(caught.value)
    assert "shutdown(force=True)" not in str(caught.value)


def test_a_shutdown_while_a_function_runs_says_what_is_kept() -> None:
    cluster = FakeCluster()
    made = controller(cluster)
    stopper = Stopper(made, cluster)
    cluster.calls = deque([ShutDown(stopper.stop)])
    with pytest.raises(TrainerShutdownError, match=r"Checkpoints that the functions saved are kept\."):
        made.run(Call(read))
    stopper.join()


def test_a_function_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"`train_func` cannot be sent to the workers.*make it there"):
        Trainer(BackendConfig(), logdir=tmp_path).run(lambda: lock.locked())
