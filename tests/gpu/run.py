"""Runs the cases for GPUs, in parts of at most four minutes, and writes what came of each at once.

    make gpu PART=1                                     # on a machine with one or more GPUs
    python -m tests.gpu.run --part 1 --json part-1.json # the same
    python -m tests.gpu.run --part 3 --device cpu --backend gloo    # the cases themselves, without a GPU

Each case runs in a process of its own, on one Ray cluster. A case that takes too long is ended. A part that takes more
than its time leaves the other cases out, and says so.

On a machine that has one GPU, 16 cores and no network, for a quarter of an hour: bring wheels of Ray, of what Ray needs
and PyTorch's environment lacks, and of this project, and a `libnccl.so.2` of version 2.30 or later. Then, in this
order, with the seconds that each line is expected to take (they were counted from runs on CPUs, never on a GPU):

    export LD_PRELOAD=/path/of/libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2
    export NCCL_DEBUG=WARN OMP_NUM_THREADS=1
    python -m tests.gpu.run --part 1 --json part-1.json --limit-s 100    # 70 s: can ranks reach each other?
    export $(python -m tests.gpu.run --variables part-1.json)            # how ranks on this machine reach each other
    python -m tests.gpu.run --part 3 --json part-3.json                  # 200 s: losses
    python examples/benchmarks/gpu_recovery.py --sizes 2,4 --repetitions 2 --json recovery.json    # 120 s: figures
    python -m tests.gpu.run --part 2 --only fp32 --json part-2.json --limit-s 120    # 90 s: numbers
    python -m tests.gpu.run --part 4 --json part-4.json --limit-s 100    # 50 s: FSDP
    python -m tests.gpu.run --part 2 --only bf16 --json part-2-bf16.json # 60 s, and what else there is time for

What the results may say:

- A loss ends in wrong weights: a step was taken with incomplete sums (ADR 175).
- A kill in forming the new group takes two minutes: a survivor cannot leave the initialization of NCCL. Try
  `TORCH_NCCL_USE_COMM_NONBLOCKING=1`.
- The stock loop is slower than the loop by hand: do PyTorch's waits cost the time, or raysgd's? Repeat the benchmark
  with `NCCL_BLOCKING_WAIT=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=0`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch

from raysgd.core.cluster.resources import MULTI_RANK
from raysgd.core.connections.torch import loaded_nccl
from tests.gpu.cases import CASES, ROOT, CannotRun, Case, Machine

_RESULT = "RESULT "
_NUM_CPUS = 16


def gpus() -> list[dict[str, str]]:
    """Return the name and the UUID of each GPU."""
    return [dict(zip(("name", "uuid"), line.split(", "), strict=True)) for line in _query("gpu", "name,uuid")]


def gpu_memory(known: Collection[str] = (), wait_s: float = 0.0) -> dict[str, str]:
    """Return the memory that each process uses on GPUs, by the process's ID.

    Args:
        known: IDs of processes to leave out.
        wait_s: Seconds to wait for the others to end.
    """
    deadline = time.monotonic() + wait_s
    while True:
        used = dict(line.split(", ") for line in _query("compute-apps", "pid,used_memory"))
        used = {pid: memory for pid, memory in used.items() if pid not in known}
        if not used or time.monotonic() >= deadline:
            return used
        time.sleep(0.2)


def _query(what: str, columns: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader"]
    with suppress(FileNotFoundError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return []


def machine_of(device: str, backend: str) -> dict[str, Any]:
    """Return what the results were measured on."""
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.init()
    return {
        "device": device,
        "backend": backend,
        "gpus": gpus() if device == "cuda" else [],
        "nccl_loaded": loaded_nccl() if device == "cuda" else 0,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NCCL_")},
        "several_ranks_on_a_gpu": os.environ.get(MULTI_RANK) == "1",
        "torch": torch.__version__,
        "ray": ray.__version__,
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def run_apart(case: Case, device: str, backend: str, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run a case in a process of its own, and return what came of it."""
    command = [sys.executable, "-m", "tests.gpu.run", "--device", device, "--backend", backend, "--case", case.name]
    began, end = time.monotonic(), "failed"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end = "hung"
            os.kill(process.pid, signal.SIGUSR2)  # faulthandler then prints all stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    told = [line.removeprefix(_RESULT) for line in text.splitlines() if line.startswith(_RESULT)]
    result = json.loads(told[-1]) if told else {"status": end}
    if result["status"] not in ("passed", "cannot run"):
        result["output"] = text[-4000:]
    return {"name": case.name, "seconds": round(time.monotonic() - began, 1), **result}


def run_here(case: Case, device: str, backend: str) -> dict[str, Any]:
    """Run a case in this process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"status": "passed", "found": case.run(Machine(device, backend, Path(folder)))}
        except CannotRun as error:
            return {"status": "cannot run", "why": str(error)}


def ranks_on_a_gpu(case: Case, num_gpus: int) -> int | None:
    """Return how many ranks share a GPU in a case, by the largest number in its name or arguments."""
    sizes = [int(number) for number in re.findall(r"\b(\d+)\b", case.name)] or [2]
    return -(-max(sizes) // num_gpus) if num_gpus else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted({case.part for case in CASES}))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--only", default="", help="run only the cases whose name has this text")
    parser.add_argument("--json", type=Path, help="file to write after each case")
    parser.add_argument("--limit-s", type=float, default=230.0, help="seconds for the whole part")
    parser.add_argument("--variables", type=Path, help="print what the first case of part 1 has found, for `export`")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variables:
        found_there = json.loads(args.variables.read_text())["cases"][0]["found"]["variables"]
        print(*(f"{name}={value}" for name, value in found_there.items()))
        return 0
    if args.case:
        import faulthandler

        faulthandler.register(signal.SIGUSR2)
        [case] = [case for case in CASES if case.name == args.case]
        print(_RESULT + json.dumps(run_here(case, args.device, args.backend)), flush=True)
        return 0
    began, found = time.monotonic(), []
    chosen = [case for case in CASES if args.part in (None, case.part) and args.only in case.name]
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    ray.init(
        num_cpus=_NUM_CPUS, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    machine = machine_of(args.device, args.backend)
    for case in chosen:
        left_s = args.limit_s - (time.monotonic() - began)
        if left_s < 15:
            result: dict[str, Any] = {"name": case.name, "status": "cannot run", "why": "no time was left in this part"}
        else:
            before = gpu_memory()
            limit_s = case.limit_s if num_gpus else 4 * case.limit_s  # a machine without GPUs has fewer cores, too
            result = run_apart(case, args.device, args.backend, environment, min(limit_s, left_s))
            if result["status"] == "hung" and left_s < limit_s:
                result |= {"status": "cannot run", "why": "the time of this part ended"}
            result["ranks_on_a_gpu"] = ranks_on_a_gpu(case, num_gpus)
            if num_gpus and (left := gpu_memory(before, wait_s=5.0)):
                result |= {"status": "failed", "left_on_gpus": left}
        found.append(result)
        print(
            f"{result['status']:10} {result.get('seconds', 0):6.1f} s  {case.name}  {result.get('why', '')}", flush=True
        )
        if result["status"] in ("failed", "hung"):
            print(result.get("output", ""), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({"part": args.part, "machine": machine, "cases": found}, indent=1))
    ray.shutdown()
    return sum(result["status"] in ("failed", "hung") for result in found)


if __name__ == "__main__":
    sys.exit(main())
