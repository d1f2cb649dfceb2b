"""Programs that end Ray while the library still calls it. Covers `raysgd.core.cluster.ray_cluster`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.stories import ROOT

pytestmark = pytest.mark.integration

PROGRAM = """
import sys, time, torch
from raysgd.exceptions import TrainerShutdownError, WorkersLostError
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator


class Large(LinearOperator):
    def setup(self, config):
        super().setup(config)
        self.model.register_buffer("ballast", torch.zeros(int(25e6) * config["size"]))

    def train_batch(self, batch, batch_info):
        time.sleep(0.1)
        return super().train_batch(batch, batch_info)


how, path = sys.argv[1:]
options = {"config": {"size": 4 if "load" in how else 1}, "num_cpus_per_worker": 0.5, "use_gpu": False}
trainer = TorchTrainer(training_operator_cls=Large, num_workers=1, **options)
import ray

if how.startswith("load"):
    trainer.save(path)
    trainer.load(path)
if how == "load, then both end":
    trainer.shutdown()
if how == "save in the background":
    trainer.save(path, blocking=False)
handle = trainer.train(blocking=False) if how == "train in the background" else None
ray.shutdown()
if handle is not None:
    try:
        handle.result(60)
    except TrainerShutdownError as error:
        print("its session" if "ray.shutdown" in str(error) else error)
if how == "save in the background":
    try:
        trainer.shutdown()
    except WorkersLostError as error:
        print("its session" if "ray.shutdown" in str(error) else error)
print("Ray is", "running" if ray.is_initialized() else "ended")
"""
ENDS = {
    "load, then both end": [],
    "load, then Ray ends": [],
    "train in the background": ["its session"],
    "save in the background": ["its session"],
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_ray_first_keeps_its_status_and_starts_no_other(
    how: str, ray_cluster: None, tmp_path: Path
) -> None:
    import ray

    environment = {**os.environ, "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}
    command = [sys.executable, "-c", PROGRAM, how, str(tmp_path / "file.pt")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    # A save that was quicker than the end of Ray has nothing to say.
    is_saved = how == "save in the background" and (tmp_path / "file.pt").exists()
    said = [] if is_saved else ENDS[how]
    assert (done.returncode, done.stdout.splitlines()) == (0, [*said, "Ray is ended"]), done.stderr
    assert done.stderr.count("Connecting to existing Ray cluster") == 1, done.stderr


READS = """
import os, signal, threading, time
import numpy, ray
from ray.cluster_utils import Cluster
from raysgd.core.cluster.ray_cluster import RayThreads
from raysgd.core.engine.transfers import transfer

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1, resources={"other": 1})
ray.init(address=cluster.address, log_to_driver=False)
reference = ray.remote(resources={"other": 1})(lambda: numpy.ones(10_000_000)).remote()
ray.wait([reference], fetch_local=False)
pid = node.all_processes["raylet"][0].process.pid
os.kill(pid, signal.SIGSTOP)
coming = RayThreads().start(lambda: transfer(reference).result(None).sum(), "reader")
time.sleep(1.0)
threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
ray.shutdown()
print(coming.result(60))
cluster.shutdown()
"""


def test_the_end_of_ray_waits_for_a_value_that_a_thread_reads_from_another_node() -> None:
    environment = {each: value for each, value in os.environ.items() if each != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", READS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["10000000.0"]), done.stderr
