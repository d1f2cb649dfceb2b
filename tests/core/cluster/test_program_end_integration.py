"""A program that ends while calls are running. Covers `raysgd.core.cluster.ray_cluster`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.stories import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
import atexit, threading, time, weakref

weakref.finalize(time, int)  # Python's hook for finalizers is there before Ray's, as with PyTorch

from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator


class Slow(LinearOperator):
    def train_batch(self, batch, batch_info):
        time.sleep(0.1)
        return super().train_batch(batch, batch_info)


def train_on():
    while True:
        trainer.train()


trainer = TorchTrainer(training_operator_cls=Slow, num_workers=1, num_cpus_per_worker=0.5, use_gpu=False)
handles = [trainer.train(num_steps=1, blocking=False), *(trainer.train(blocking=False) for _ in range(3))]
threading.Thread(target=train_on, daemon=True).start()
atexit.register(lambda: print("epoch", handles[0].result()["epoch"]))
"""


def test_running_calls_end_before_ray_does_and_start_no_other(ray_cluster: None) -> None:
    import ray

    environment = {**os.environ, "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.split()) == (0, ["epoch", "1"]), done.stderr
    assert done.stderr.count("Connecting to existing Ray cluster") == 1, done.stderr


SIGNALED = """
import signal, sys, time

from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator


class Slow(LinearOperator):
    def train_batch(self, batch, batch_info):
        time.sleep(0.5)
        return super().train_batch(batch, batch_info)


trainer = TorchTrainer(Slow, num_workers=2, num_cpus_per_worker=0.5, use_gpu=False)
trainer.train(num_steps=1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("training", flush=True)
while True:
    trainer.train()
"""


@pytest.mark.soak
def test_a_program_that_is_ended_together_with_its_cluster_does_not_wait_for_it() -> None:
    """As `timeout` ends one: the signal goes to the processes of Ray, too, and no one answers the driver any more."""
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", SIGNALED]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as program:
        assert program.stdout.readline() == "training\n"
        os.killpg(program.pid, signal.SIGTERM)
        _, errors = program.communicate(timeout=240)
    assert "Failed to connect to GCS within 60 seconds" not in errors
    assert program.returncode == 7
