"""The script for Slurm starts a cluster and trains on it. The nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "deploy" / "train.sbatch"
FIRST_PORT = 20000
"""The script adds the last digits of the job's number."""

PROGRAM = """
import json
import ray, torch
from torch.utils.data import DataLoader, TensorDataset
from raysgd import TorchTrainer, TrainingOperator

class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        self.register_data(train_loader=DataLoader(TensorDataset(x, 2 * x), 8))

ray.init(address="auto")
with TorchTrainer(training_operator_cls=Line, num_workers=2) as trainer:
    losses = [trainer.train()["train_loss"] for _ in range(3)]
    nodes = trainer.apply_all_workers(lambda: ray.get_runtime_context().get_node_id())
print(json.dumps({"losses": losses, "num_nodes": len(set(nodes)), "known": len(ray.nodes())}))
"""

STOPPING_PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(print("stopped at SIGTERM") or STATUS))
os.kill(os.getppid(), signal.SIGNAL)  # as Slurm does before the time limit, or at `scancel`
time.sleep(300)
"""


def stopping_program(status: int, told_by: str = "SIGUSR1") -> str:
    """A program that tells the script to stop it, by a signal, and ends with this status."""
    return STOPPING_PROGRAM.replace("STATUS", str(status)).replace("SIGNAL", told_by)


@contextlib.contextmanager
def job_in(folder: Path, program: str = PROGRAM, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script as a job with two nodes of one CPU; like Slurm, writes to a file and ends all steps after it."""
    place_commands(folder / "home" / "venv" / "bin")
    (folder / "home" / ".ray").mkdir()
    if "RAY_AUTH_MODE" not in variables:
        (folder / "home" / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    (folder / "train.py").write_text(program)
    with (folder / "out").open("wb") as out:
        job = subprocess.Popen(
            [str(shutil.which("bash")), str(SCRIPT)],
            cwd=folder,
            env=environment(folder) | variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=300)
            yield job
        finally:
            end_steps(job.pid)


def place_commands(folder: Path) -> None:
    """An environment whose `activate` leads to this one's Python, and to Slurm's commands."""
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f'export PATH="{folder}:{Path(sys.executable).parent}:$PATH"\n')
    for name in ("srun", "scontrol"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.examples.slurm {name} "$@"\n')
        (folder / name).chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a job; of Ray's, which the clusters of other tests add to, only what keeps the nodes small."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 1024 * 1024),
        "RAY_TMPDIR": os.environ["TMPDIR"],
        "RAY_USAGE_STATS_ENABLED": "0",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(free_port() - FIRST_PORT),
        "SLURM_JOB_NODELIST": "node1,node2",
    }


def free_port() -> int:
    """A port that the script can choose."""
    for port in range(FIRST_PORT, FIRST_PORT + 10000):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("", port))
            return port
    raise AssertionError("all ports are taken")


def end_steps(group: int) -> None:
    """Asks all processes of the job to end, and ends those that do not."""
    for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.1)


def test_a_program_trains_on_all_nodes_of_the_job(tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        said = (tmp_path / "out").read_text()
    assert job.returncode == 0, said
    [found] = [json.loads(line) for line in said.splitlines() if line.startswith('{"losses"')]
    assert (found["num_nodes"], found["known"]) == (2, 2), said
    assert found["losses"] == sorted(found["losses"], reverse=True)


def test_a_job_whose_head_cannot_start_ends(tmp_path: Path) -> None:
    with job_in(tmp_path, RAY_AUTH_MODE="token") as job:  # and no token
        said = (tmp_path / "out").read_text()
    assert job.returncode == 1, said
    assert "no authentication token was found" in said


@pytest.mark.parametrize("status", [143, 134])  # 134: while workers start
def test_a_job_near_its_time_limit_stops_its_program_and_is_requeued(status: int, tmp_path: Path) -> None:
    with job_in(tmp_path, stopping_program(status)) as job:
        said = (tmp_path / "out").read_text()
    assert job.returncode == 0, said
    assert said.index("stopped at SIGTERM") < said.index("requeued job")


def test_a_job_that_is_canceled_lets_its_program_save_and_is_not_requeued(tmp_path: Path) -> None:
    with job_in(tmp_path, stopping_program(143, "SIGTERM")) as job:
        said = (tmp_path / "out").read_text()
    assert job.returncode == 143, said
    assert "stopped at SIGTERM" in said
    assert "requeued job" not in said


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_whose_program_was_done_or_failed_near_its_time_limit_is_not_requeued(
    status: int, tmp_path: Path
) -> None:
    with job_in(tmp_path, stopping_program(status)) as job:
        said = (tmp_path / "out").read_text()
    assert job.returncode == status, said
    assert "stopped at SIGTERM" in said
    assert "requeued job" not in said
