"""The head of a Ray cluster whose GCS keeps its tables in Redis is killed and started again under a training.

Run it by `python -m tests.detached.head_restart`. It prints what it saw. It needs `redis-server`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from raysgd.utils import find_free_port
from tests.detached.programs import OPERATOR, Program
from tests.helpers.processes import wait_until
from tests.helpers.ray_start import VARIABLES

NUM_SAMPLES = 120
STEP_S = 0.3
AWAY_S = 5.0


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, which is ended at once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    process.wait()


def ray_start(*options: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return running(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options)


def steps(log: Path) -> list[tuple[str, float, list[int]]]:
    """Kind, moment and samples of each batch that two workers trained together."""
    lines = [line.split(" ", 4) for line in log.read_text().splitlines()] if log.exists() else []
    return [(line[0], float(line[2]), json.loads(line[4])) for line in lines if line[3] == "2"]


def await_nodes(address: str, count: int) -> Program:
    """A program that is connected to a cluster with so many nodes."""
    deadline = time.monotonic() + 120
    while True:
        program = Program(address)
        program.begin(f"{OPERATOR}\nimport ray; ray.init(log_to_driver=False); None")
        if program.found()["error"] is None:
            break
        program.kill()
        assert time.monotonic() < deadline, "no head in two minutes"
    wait_until(lambda: program.run("sum(node['Alive'] for node in ray.nodes())") >= count)
    return program


def trial(address: str, head: list[str], log: Path, first_head: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill the head in a call, start it again, and go on; return what was seen."""
    place = "raysgd.Detached('run', resources={'stays': 0.01})"
    config = f"{{'step_s': {STEP_S}, 'num_samples': {NUM_SAMPLES}}}"
    with await_nodes(address, 3) as program:
        program.run(f"trainer = make({str(log)!r}, {place}, config={config}, resources_per_worker={{'stays': 0.01}})")
        pids = program.run("pids(trainer)")
        program.begin("trainer.train()")
        wait_until(lambda: len(steps(log)) >= 8)
        end(first_head)
        away_since = time.time()
        time.sleep(AWAY_S)
    # On this one machine Ray would take the nodes for a cluster that has its head already.
    (Path(os.environ["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").unlink()
    while_away = [moment for _, moment, _ in steps(log) if moment > away_since]
    with ray_start(*head), await_nodes(address, 3) as program:
        attached_after_s = time.time() - away_since
        program.run("trainer = raysgd.attach('run'); call = trainer.pending()")
        found: dict[str, Any] = {
            "epochs": [program.run("call.result()['epoch']"), program.run("trainer.train()['epoch']")],
            "same_workers": program.run("pids(trainer)") == pids,
            "num_steps_while_away": len(while_away),
            "attached_after_s": round(attached_after_s, 1),
        }
        os.kill(pids[0], signal.SIGKILL)
        found["epoch_after_a_loss"] = program.run("trainer.train()['epoch']")
        os.kill(program.run("ray.get(trainer._actor.describe.remote())['pid']"), signal.SIGKILL)
        found["epoch_after_the_host_died"] = program.run("trainer.train()['epoch']")
        program.run("trainer.shutdown()")
        found["left"] = program.run("len(raysgd.detached_trainers())")
    counts = Counter(sample for kind, _, batch in steps(log) if kind in ("train0", "train1") for sample in batch)
    found["each_sample_once"] = counts == dict.fromkeys(range(NUM_SAMPLES), 2)
    moments = sorted(moment for kind, moment, _ in steps(log) if kind == "train0")
    found["largest_gap_s"] = round(max(b - a for a, b in pairwise(moments)), 2)
    return found


def main() -> None:
    """Run the trial."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="h-"))
    redis_port, port = find_free_port(), find_free_port()
    os.environ.update(
        VARIABLES, RAY_AUTH_MODE="token", RAY_REDIS_ADDRESS=f"127.0.0.1:{redis_port}", RAY_TMPDIR=str(folder)
    )
    address, stays = f"127.0.0.1:{port}", ["--num-cpus=2", '--resources={"stays": 1}']
    head = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    redis = ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(folder)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(*redis))
        first_head = stack.enter_context(ray_start(*head))
        for count in (1, 2):
            await_nodes(address, count).kill()  # a node that finds no head, or starts beside another one, gives up
            stack.enter_context(ray_start(f"--address={address}", *stays))
        print(json.dumps(trial(address, head, folder / "log", first_head)))


if __name__ == "__main__":
    main()
