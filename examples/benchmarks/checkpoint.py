"""Saving and loading 200 MiB of training state: how long training stops, and how much memory it takes.

    python examples/benchmarks/checkpoint.py [--smoke-test] [--repetitions 7] [--peers torch_save,dcp_async]

The state is 100 MiB of weights and 100 MiB of momentum. For raysgd it is in the driver (`use_local=True`), in one
remote worker, or in each of `--num-workers` remote workers. Every repetition measures, in this order,

* a call of `train(num_steps=1)`: its time, of that what is beyond the loop itself, and how long the copy of the
  state takes that the worker makes at its end;
* right after another such call, `save(path, blocking=False)`: how long it takes to return, how much longer than
  usual the next call of `train` takes, and when the file is complete (on the disk, with its checksum);
* after such a call `apply_all_operators`, which may change the state, and the same save, both together, and again how
  much longer the next call of `train` takes;
* `save(path)`, and `load(path)` against `torch.load` with `load_state_dict` of the same content, in one process, and
  in as many bare actors at once as there are remote workers.

Memory is the private memory of the driver, beyond what it had before, as a multiple of the state; objects in Ray's
store are shared and do not count.

The peers save the same state from a single process: `torch.save`, `torch.distributed.checkpoint` with and without
waiting (it copies with its `DefaultStager`), and Ray Train, whose worker writes the file and reports it. Files are in
the page cache when they are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import (
    MIB,
    OWN,
    Report,
    Target,
    choose_peers,
    dispatch,
    estimate,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)
from _workloads import STATES, TimedOperator, config_of, copies_made, sgd, watch_copies
from torch import nn

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator

PEERS = {"torch_save": "torch", "dcp_save": "torch", "dcp_async": "torch", "ray_train": "ray.train"}
NUM_WARM_UP_ROUNDS = 1
LOCAL = "raysgd, local"
_FIGURES = {
    "call_s": ("train()", 1e3),
    "call_beyond_loop_s": ("beyond its loop", 1e3),
    "copy_s": ("the copy", 1e3),
    "stall_s": ("save returns", 1e3),
    "next_train_delay_s": ("next train() delayed by", 1e3),
    "apply_and_save_s": ("apply_all and save", 1e3),
    "next_train_delay_after_both_s": ("next train() delayed by", 1e3),
    "complete_s": ("file complete", 1e3),
    "blocking_save_s": ("save and wait", 1e3),
    "load_s": ("load", 1e3),
    "torch_load_s": ("torch.load", 1e3),
    "actors_load_s": ("torch.load in actors", 1e3),
}
_MEMORY = {
    "first_save_copies": "train() and first save",
    "second_save_copies": "train() and second save",
    "load_copies": "load",
    "torch_load_copies": "torch.load",
}
Figures = dict[str, list[float]]


# ------------------------------------------------------------------------------------------------------ measuring


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _until_exists(path: Path) -> None:
    """Return whether the file is complete: raysgd gives it its name only when all of it is on the disk."""
    while not path.exists():
        time.sleep(0.0005)


@dataclass(frozen=True)
class Memory:
    """The additional private memory of this process, in copies of the state: the peak, and at the end."""

    peak: float
    kept: float


def _memory_of(call: Callable[[], Any], num_bytes: int) -> Memory:
    """Measure the memory of `call`; `num_bytes` is the size of the state."""
    before = _live_bytes()
    seen = [before]
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.001):
            seen.append(_private_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        call()
    finally:
        is_over.set()
        thread.join()
    kept = _live_bytes() - before
    return Memory((max(seen) - before) / num_bytes, kept / num_bytes)


def _live_bytes() -> int:
    """Return the private memory, without memory that was freed but not returned to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _private_bytes()


def _private_bytes() -> int:
    """Return memory that no other process shares; objects in Ray's store are shared."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


class PlainTraining:
    """A model and an optimizer that hold the state, without a library."""

    def __init__(self, state: str) -> None:
        workload = STATES[state]
        self.model = workload.model()
        self.optimizer = sgd(self.model)
        self._features = torch.randn(1, *workload.input_shape)

    def step(self) -> None:
        """Take one step, which also creates the momentum."""
        loss = nn.CrossEntropyLoss()(self.model(self._features), torch.zeros(1, dtype=torch.long))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def num_bytes(self) -> int:
        """Return weights and momentum."""
        return 2 * sum(parameter.nbytes for parameter in self.model.parameters())


# ------------------------------------------------------------------------------------------------------ raysgd


def run_raysgd(state: str, num_workers: int, use_local: bool, num_repetitions: int) -> Figures:
    """Return all figures for one placement of workers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        if not use_local:
            stack.enter_context(ray_cluster(num_workers, object_store_mib=256 if state == "small_state" else 2048))
        trainer = stack.enter_context(
            TorchTrainer(
                training_operator_cls=TimedOperator,
                config=config_of(STATES[state], num_workers),
                num_workers=num_workers,
                use_local=use_local,
            )
        )
        trainer.apply_all_workers(watch_copies)
        arrangement = Arrangement(trainer, PlainTraining(state), folder)
        if not use_local:
            arrangement.add_actors(state, num_workers)
        memory = arrangement.memory()  # first, while nothing is kept from an earlier call
        rounds = [arrangement.measure() for _ in range(NUM_WARM_UP_ROUNDS + num_repetitions)][NUM_WARM_UP_ROUNDS:]
    return {**memory, **{name: [measured[name] for measured in rounds if name in measured] for name in rounds[-1]}}


class Arrangement:
    """A trainer, and the same state without raysgd.

    Args:
        trainer: Trainer to measure.
        plain: State to compare with.
        folder: Folder for files.
    """

    def __init__(self, trainer: TorchTrainer, plain: PlainTraining, folder: Path) -> None:
        self._trainer = trainer
        self._plain = plain
        self._file, self._plain_file = folder / "raysgd.pt", folder / "plain.pt"
        self._actors: list[Any] = []
        plain.step()
        plain.save(self._plain_file)
        self._train()

    def add_actors(self, state: str, count: int) -> None:
        """Create plain Ray actors that load the state themselves."""
        import ray

        actor = ray.remote(num_cpus=0)(PlainTraining)
        self._actors = [actor.remote(state) for _ in range(count)]
        ray.get([actor.step.remote() for actor in self._actors])

    def measure(self) -> dict[str, float]:
        """Run one repetition."""
        call = self._call()
        return {**call, **self._save(call["call_s"]), **self._load()}

    def memory(self) -> Figures:
        """Return the driver's memory for saving and loading: the peak, and at the end."""
        calls = {
            "first_save_copies": self._save_to_the_end,
            "second_save_copies": self._save_to_the_end,
            "load_copies": lambda: self._trainer.load(self._file),
            "torch_load_copies": lambda: self._plain.load(self._plain_file),
        }
        found = {name: _memory_of(call, self._plain.num_bytes) for name, call in calls.items()}
        return {name: [memory.peak, memory.kept] for name, memory in found.items()}

    def _save_to_the_end(self) -> None:
        self._file.unlink(missing_ok=True)
        self._train()
        self._trainer.save(self._file, blocking=False)
        _until_exists(self._file)

    def _train(self) -> float:
        """Take one step; return the seconds of the loop alone."""
        return float(self._trainer.train(num_steps=1)["loop_s"])

    def _settle(self) -> None:
        """Wait until no snapshot is in progress."""
        self._trainer.state_dict()

    def _call(self) -> dict[str, float]:
        self._settle()
        began = time.perf_counter()
        loop_s = self._train()
        ended = time.perf_counter()
        self._settle()
        copies = [seconds for at, seconds in self._trainer.apply_all_workers(copies_made)[0] if at >= began]
        times = {"call_s": ended - began, "call_beyond_loop_s": ended - began - loop_s}
        return {**times, **({"copy_s": copies[0]} if copies else {})}

    def _save(self, usual_s: float) -> dict[str, float]:
        self._settle()
        self._file.unlink(missing_ok=True)
        self._train()
        began = time.perf_counter()
        stall_s = _seconds(lambda: self._trainer.save(self._file, blocking=False))
        delayed_s = _seconds(self._train)
        _until_exists(self._file)
        complete_s = time.perf_counter() - began
        self._settle()
        self._train()
        both_s = _seconds(self._apply_and_save)
        delayed_after_both_s = _seconds(self._train)
        self._settle()
        return {
            "stall_s": stall_s,
            "next_train_delay_s": delayed_s - usual_s,
            "apply_and_save_s": both_s,
            "next_train_delay_after_both_s": delayed_after_both_s - usual_s,
            "complete_s": complete_s,
            "blocking_save_s": _seconds(lambda: self._trainer.save(self._file)),
        }

    def _apply_and_save(self) -> None:
        self._trainer.apply_all_operators(_change_nothing)
        self._trainer.save(self._file, blocking=False)

    def _load(self) -> dict[str, float]:
        self._settle()
        loads = {
            "torch_load_s": _seconds(lambda: self._plain.load(self._plain_file)),
            "load_s": _seconds(lambda: self._trainer.load(self._file)),
        }
        self._settle()
        return {**loads, **({"actors_load_s": _seconds(self._load_in_actors)} if self._actors else {})}

    def _load_in_actors(self) -> None:
        import ray

        ray.get([actor.load.remote(self._plain_file) for actor in self._actors])


def _change_nothing(operator: TrainingOperator) -> None:
    """Do nothing, which the trainer cannot know: the call may change the state."""


# ------------------------------------------------------------------------------------------------------ peers


def run_torch_save(state: str, num_repetitions: int) -> Figures:
    """Run `torch.save`; the file is complete when it returns, but not yet on the disk."""
    plain = PlainTraining(state)
    plain.step()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "plain.pt"
        saves, loads = [], []
        for _ in range(NUM_WARM_UP_ROUNDS + num_repetitions):
            plain.step()
            path.unlink(missing_ok=True)
            saves.append(_seconds(lambda: plain.save(path)))
            loads.append(_seconds(lambda: plain.load(path)))
    saves, loads = saves[NUM_WARM_UP_ROUNDS:], loads[NUM_WARM_UP_ROUNDS:]
    return {"stall_s": saves, "complete_s": saves, "load_s": loads}


def run_dcp(state: str, num_repetitions: int, is_async: bool) -> Figures:
    """Run `torch.distributed.checkpoint`."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = PlainTraining(state)
    plain.step()

    def current() -> dict[str, Any]:
        model, optimizer = get_state_dict(plain.model, plain.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(path: Path) -> None:
        content = current()
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            plain.model,
            plain.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )

    figures: Figures = {"stall_s": [], "complete_s": [], "load_s": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for index in range(NUM_WARM_UP_ROUNDS + num_repetitions):
            plain.step()
            path = Path(folder) / str(index)
            began = time.perf_counter()
            pending: Any = (dcp.async_save if is_async else dcp.save)(current(), checkpoint_id=path)
            figures["stall_s"].append(time.perf_counter() - began)
            if is_async:
                pending.result()
            figures["complete_s"].append(time.perf_counter() - began)
            figures["load_s"].append(_seconds(functools.partial(load, path)))
            shutil.rmtree(path)
    dist.destroy_process_group()
    return {name: values[NUM_WARM_UP_ROUNDS:] for name, values in figures.items()}


def run_ray_train(state: str, num_repetitions: int) -> Figures:
    """Run one worker of Ray Train that writes a file and reports it, as in the documentation."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(2):
        output = Path(folder) / "seconds.json"
        RayTrainer(
            _ray_train_loop,
            train_loop_config={
                "state": state,
                "num_rounds": NUM_WARM_UP_ROUNDS + num_repetitions,
                "output": str(output),
            },
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(storage_path=folder, name="checkpoint"),
        ).fit()
        seconds = json.loads(output.read_text())[NUM_WARM_UP_ROUNDS:]
    return {"stall_s": seconds, "complete_s": seconds}


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    plain = PlainTraining(config["state"])
    seconds: list[float] = []
    for _ in range(config["num_rounds"]):
        plain.step()
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            plain.save(Path(folder) / "state.pt")
            ray.train.report({"step": len(seconds)}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        seconds.append(time.perf_counter() - began)
    Path(config["output"]).write_text(json.dumps(seconds))


ROLES: dict[str, Callable[..., Figures]] = {
    OWN: run_raysgd,
    "torch_save": run_torch_save,
    "dcp_save": functools.partial(run_dcp, is_async=False),
    "dcp_async": functools.partial(run_dcp, is_async=True),
    "ray_train": run_ray_train,
}


# ------------------------------------------------------------------------------------------------------ the whole


def report_times(report: Report, runs: dict[str, Figures]) -> None:
    """Record and print all durations."""
    rows = []
    for name, figures in runs.items():
        cells = []
        for figure, (_, factor) in _FIGURES.items():
            samples = figures.get(figure)
            if samples:
                value = estimate([sample * factor for sample in samples])
                report.result(name, figure.removesuffix("_s") + "_ms", value)
            cells.append(value.text() if samples else "-")
        rows.append([name, *cells])
    report.table("Milliseconds", ["contender", *(title for title, _ in _FIGURES.values())], rows)


def report_memory(report: Report, runs: dict[str, Figures]) -> None:
    """Record and print the memory of the driver."""
    rows = []
    for name, figures in runs.items():
        if not all(figure in figures for figure in _MEMORY):
            continue
        for figure in _MEMORY:
            peak, kept = figures[figure]
            report.result(name, f"peak_{figure}", peak)
            report.result(name, f"kept_{figure}", kept)
        rows.append([name, *("{:.2f}, {:.2f}".format(*figures[figure]) for figure in _MEMORY)])
    title = "Memory of the driver beyond what it had before, in copies of the state: peak, kept"
    report.table(title, ["contender", *_MEMORY.values()], rows)


def targets_of(runs: dict[str, Figures]) -> list[Target]:
    """Return the targets."""

    def median_ms(contender: str, figure: str) -> float | None:
        samples = runs.get(contender, {}).get(figure)
        return estimate(samples).median * 1e3 if samples else None

    def load_ratio(contender: str) -> float | None:
        load_ms, torch_ms = median_ms(contender, "load_s"), median_ms(contender, "torch_load_s")
        return load_ms / torch_ms if load_ms and torch_ms else None

    targets = [
        Target(f"{name}: save returns, ms", 30.0, True, median_ms(name, "stall_s")) for name in runs if OWN in name
    ]
    targets += [
        Target(f"{name}: apply_all and save, ms", 30.0, True, median_ms(name, "apply_and_save_s"))
        for name in runs
        if OWN in name and name != LOCAL
    ]
    return targets + [Target(f"{name}: load / torch.load", 1.0, True, load_ratio(name)) for name in runs if OWN in name]


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=7, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    state = "large_state"
    if arguments.smoke_test:
        state, arguments.repetitions = "small_state", 1
    report = Report("checkpoint", arguments, peers)

    run = functools.partial(run_job, __file__, state=state, num_repetitions=arguments.repetitions)
    sizes = {arguments.num_workers} if arguments.smoke_test else {1, arguments.num_workers}
    remote = {
        f"raysgd, {size} remote": functools.partial(run, OWN, num_workers=size, use_local=False)
        for size in sorted(sizes)
    }
    own = {LOCAL: functools.partial(run, OWN, num_workers=1, use_local=True), **remote}
    jobs: dict[str, Callable[[], Figures]] = {**own, **{name: functools.partial(run, name) for name in peers.selected}}
    runs = {name: found[0] for name, found in take_turns(jobs, 1, report).items()}
    print(f"\nThe state has {2 * sum(p.nbytes for p in STATES[state].model().parameters()) / MIB:.3g} MiB.", flush=True)
    report_times(report, runs)
    report_memory(report, runs)
    report.finish(targets_of(runs))


if __name__ == "__main__":
    main()
