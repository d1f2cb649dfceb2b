"""What is to be shown on GPUs, as cases that run one by one in a process of their own; `run.py` runs them.

A case returns what it has found, as plain values. It raises `AssertionError` if something is wrong, or `CannotRun` with
a reason if the machine lacks something. All cases run on CPUs over gloo, too, as a check of the cases themselves.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from raysgd import Recovery, train
from raysgd.core.cluster.resources import MULTI_RANK, why_ranks_cannot_share
from raysgd.core.connections.torch import loaded_nccl
from raysgd.testing import hang_rank, kill_worker
from raysgd.torch import TorchTrainer
from raysgd.train import ScalingConfig
from raysgd.train.torch import TorchConfig
from tests.gpu.all_reduce import reduce
from tests.gpu.operators import GAN, PLACES, Classifier, DiesInHandOver

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
NUM_SAMPLES = 16 * 12 + 1
NUM_STEPS = 13


class CannotRun(Exception):
    """The machine lacks what the case needs."""


@dataclass(frozen=True)
class Machine:
    """Where a case runs.

    Attributes:
        device: "cuda" or "cpu".
        backend: "nccl" or "gloo".
        folder: An empty folder.
    """

    device: str
    backend: str
    folder: Path

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 0

    def share(self, num_workers: int) -> float:
        """Return the part of a GPU that each worker gets."""
        num_on_a_gpu = -(-num_workers // max(1, self.num_gpus))
        return 1.0 if num_on_a_gpu == 1 else 10_000 // num_on_a_gpu / 10_000

    def check(self, num_workers: int) -> None:
        """Raise `CannotRun` if this many workers cannot run here."""
        if self.device == "cpu":
            return
        if not self.num_gpus:
            raise CannotRun("PyTorch sees no GPU")
        torch.cuda.init()  # loads NCCL with PyTorch's libraries
        obstacle = why_ranks_cannot_share(os.environ.get(MULTI_RANK), loaded_nccl())
        if self.backend == "nccl" and self.share(num_workers) < 1 and obstacle:
            raise CannotRun(f"{num_workers} ranks on {self.num_gpus} GPU(s): {obstacle}")

    def options(self, num_workers: int) -> dict[str, Any]:
        """Return the arguments with which a trainer uses this machine."""
        self.check(num_workers)
        options: dict[str, Any] = {"num_workers": num_workers, "num_cpus_per_worker": 0.5, "backend": self.backend}
        if self.device == "cpu":
            return {**options, "use_gpu": False}
        return {**options, "use_gpu": True, "num_gpus_per_worker": self.share(num_workers)}

    @property
    def alone(self) -> dict[str, Any]:
        """Arguments of a trainer in this process."""
        return {"use_local": True, "use_gpu": self.device == "cuda", "backend": "gloo"}


@dataclass
class Trained:
    """What came of a training.

    Attributes:
        weights: The weights of all models.
        samples: Number of samples of each epoch.
        sizes: Number of workers after each epoch.
        events: Kinds of the events that are failures.
        seconds: Duration of each epoch.
    """

    weights: list[dict[str, torch.Tensor]]
    samples: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def trained(
    operator_cls: type[Any],
    num_epochs: int = 3,
    before: Callable[[TorchTrainer, int], object] = lambda trainer, epoch: None,
    **options: Any,
) -> Trained:
    """Train for some epochs, and check that no worker is left afterwards.

    Args:
        operator_cls: What to train.
        num_epochs: Number of epochs.
        before: Called with the trainer and the number of the epoch before each epoch.
        options: Arguments of the trainer.
    """
    found = Trained([])
    with TorchTrainer(training_operator_cls=operator_cls, split_batches=True, **options) as trainer:
        for epoch in range(num_epochs):
            before(trainer, epoch)
            began = time.monotonic()
            found.samples.append(trainer.train()["num_samples"])
            found.seconds.append(round(time.monotonic() - began, 3))
            found.sizes.append(trainer.num_workers)
        found.events = [event.kind for event in trainer.status().events if event.is_failure]
        found.weights = trainer.state_dict()["models"]
        group = trainer._life.controller.group
        pids = [info.pid for info in group.infos] if group is not None and not options.get("use_local") else []
    deadline = time.monotonic() + 20
    while (
        left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and _is_running(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"workers are left: {left}"
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def difference(found: Trained, expected: Trained) -> float:
    """Return the largest difference of two weights."""
    pairs = zip(found.weights, expected.weights, strict=True)
    return max(float((one[name].float() - other[name].float()).abs().max()) for one, other in pairs for name in other)


# ------------------------------------------------------------------------------------------------ without Ray


def all_reduce(machine: Machine, num_ranks: int) -> dict[str, Any]:
    """Find out with which of NCCL's ways ranks on this machine can sum: set what is found for the other parts."""
    machine.check(num_ranks)
    failed: dict[str, str] = {}
    for variables in ({}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}):
        os.environ.update(variables)
        folder = machine.folder / str(len(failed))
        folder.mkdir()
        try:
            torch.multiprocessing.spawn(reduce, (num_ranks, machine.device, machine.backend, folder), num_ranks)
        except torch.multiprocessing.ProcessRaisedException as error:
            failed[str(variables)] = str(error)[-500:]
        else:
            return {"variables": variables, "failed": failed, **_written(folder)}
    raise AssertionError(failed)


def abort_after_a_kill(machine: Machine, num_ranks: int, shrinks: bool = False) -> dict[str, Any]:
    machine.check(num_ranks)
    if shrinks and (machine.backend != "nccl" or not hasattr(torch.distributed, "shrink_group")):
        raise CannotRun("it takes NCCL, and a PyTorch that has the function")
    context, arguments = (
        torch.multiprocessing.get_context("spawn"),
        (num_ranks, machine.device, machine.backend, machine.folder, 1, shrinks),
    )
    processes = [context.Process(target=reduce, args=(rank, *arguments)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    left = [process.pid for process in processes if process.is_alive()]
    for process in processes:
        process.kill()
    assert not left, f"hangs after the abort: {left}"
    assert [process.exitcode for process in processes] == [-9 if rank == 1 else 0 for rank in range(num_ranks)]
    return _written(machine.folder)


def _written(folder: Path) -> dict[str, list[float]]:
    """Return what the ranks have measured, by name."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*_*-*")):
        found.setdefault(path.name.partition("-")[0], []).append(float(path.read_text()))
    return found


# ------------------------------------------------------------------------------------------------ numbers


def numbers(machine: Machine, num_workers: int, precision: str) -> dict[str, Any]:
    """Weights of several workers beside those of one process, with everything that weighs batches."""
    sets: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "class weights, ignored labels, uneven batch, clipping": (Classifier, {"clip_grad_norm": 1.0}),
        "labels that the library did not copy": (Classifier, {"config": {"copies_itself": True}}),
        "accumulation": (Classifier, {"accumulate_grad_batches": 2}),
        "two optimizers": (GAN, {}),
    }
    if machine.device == "cuda" and precision == "fp32":
        sets["sync_batchnorm"] = (Classifier, {"config": {"norm": True}, "sync_batchnorm": True})
    placed, found = machine.options(num_workers), {}
    for name, (operator_cls, options) in sets.items():
        alone = {**options, "sync_batchnorm": False} if "sync_batchnorm" in options else options
        expected = trained(operator_cls, 2, precision=precision, **alone, **machine.alone)
        together = trained(operator_cls, 2, precision=precision, **options, **placed)
        found[name] = difference(together, expected)
        assert together.samples == expected.samples
        assert found[name] < TOLERANCE[precision], f"{name}: weights differ by {found[name]}"
    return {"largest difference of weights": found}


# ------------------------------------------------------------------------------------------------ losses


def losses(
    machine: Machine,
    num_workers: int,
    arm: Callable[[TorchTrainer, int], object] = lambda trainer, epoch: None,
    /,
    *,
    operator_cls: type[Any] = Classifier,
    precision: str = "fp32",
    config: dict[str, Any] | None = None,
    num_failures: int | None = 1,
    num_epochs: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """Train with losses: the weights are those of one process."""
    expected = trained(operator_cls, num_epochs, precision=precision, config=_without(config), **machine.alone)
    options = {"precision": precision, "config": config, **machine.options(num_workers), **options}
    found = trained(operator_cls, num_epochs, arm, **options)
    apart = difference(found, expected)
    details: dict[str, Any] = {"events": found.events, "sizes": found.sizes, "epochs_s": found.seconds}
    details |= {"difference": apart, "samples in metrics": found.samples}
    assert max(found.samples) == NUM_SAMPLES, details  # metrics of a lost worker may be lost with it
    assert apart < TOLERANCE[precision], details
    assert num_failures is None or len(found.events) == num_failures, details
    return details


def _without(config: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (config or {}).items() if name != "death"}


def die_at_places(machine: Machine, places: Sequence[str], **options: Any) -> dict[str, Any]:
    """One loss for each place of a step, each in a training of its own."""
    found = {}
    for index, place in enumerate(places):
        death = {"place": place, "rank": 1, "step": NUM_STEPS + 3, "once": str(machine.folder / f"died-{index}")}
        found[place] = losses(machine, 2, config={"death": death}, **options)
        assert Path(death["once"]).exists(), f"nobody died {place}"
    return found


def _at(epoch: int, act: Callable[[TorchTrainer], object]) -> Callable[[TorchTrainer, int], object]:
    return lambda trainer, number: act(trainer) if number == epoch else None


def kill_in_a_copy(machine: Machine) -> dict[str, Any]:
    recovery = Recovery(snapshot_every_s=0)
    return losses(machine, 2, _at(1, lambda trainer: kill_worker(trainer, 1, "snapshot")), recovery=recovery)


def kill_in_a_new_group(machine: Machine) -> dict[str, Any]:
    def arm(trainer: TorchTrainer) -> None:
        kill_worker(trainer, 2, "continue")
        kill_worker(trainer, 3, "step:3")

    return losses(machine, 4, _at(1, arm), num_failures=None)


def kill_in_the_hand_over(machine: Machine) -> dict[str, Any]:
    """Rank 2 dies; the others wait for a new worker, to whom rank 0 sends the state, and dies, too."""
    config = {"once": str(machine.folder / "died")}
    arm = _at(1, lambda trainer: kill_worker(trainer, 2, "step:3"))
    (machine.folder / "died").touch()  # nothing dies in the process that shows what is right
    expected = trained(DiesInHandOver, 3, config=config, **machine.alone)
    (machine.folder / "died").unlink()
    options = {"recovery": Recovery(wait_for_workers=True), **machine.options(3)}
    found = trained(DiesInHandOver, 3, arm, config=config, **options)
    details = {"events": found.events, "sizes": found.sizes, "difference": difference(found, expected)}
    assert (machine.folder / "died").exists(), details
    assert details["difference"] < TOLERANCE["fp32"], details
    return details


def growth(machine: Machine) -> dict[str, Any]:
    """The other worker waits for a new one, which gets the state."""
    recovery = Recovery(wait_for_workers=True)
    details = losses(machine, 2, _at(1, lambda trainer: kill_worker(trainer, 1, "step:3")), recovery=recovery)
    assert details["sizes"] == [2, 2, 2], details
    return details


def freeze(machine: Machine) -> dict[str, Any]:
    recovery = Recovery(heartbeat_s=5.0)
    return losses(machine, 2, _at(1, lambda trainer: hang_rank(trainer, 1, "step:3")), recovery=recovery)


def spare(machine: Machine) -> dict[str, Any]:
    """A spare that is ready steps in; it has its part of a GPU."""

    def arm(trainer: TorchTrainer) -> None:
        while not trainer.status().num_spares:
            time.sleep(0.1)
        kill_worker(trainer, 1, "step:3")

    details = losses(machine, 3, _at(1, arm), num_workers=2, spare_workers=1)
    assert details["sizes"] == [2, 2, 2], details
    return details


def kill_several(machine: Machine, num_workers: int, num_killed: int) -> dict[str, Any]:
    ranks = list(range(num_workers - num_killed, num_workers))
    return losses(
        machine, num_workers, _at(1, lambda trainer: kill_worker(trainer, ranks, "step:3")), num_failures=None
    )


def random_kills(machine: Machine, num_workers: int, seconds: float) -> dict[str, Any]:
    """As many kills as fit, one in each epoch, of a random rank in a random step."""
    began, draw, num_kills = time.monotonic(), random.Random(4711), 0
    with TorchTrainer(training_operator_cls=Classifier, split_batches=True, **machine.options(num_workers)) as trainer:
        while time.monotonic() - began < seconds:
            kill_worker(trainer, draw.randrange(trainer.num_workers), f"step:{draw.randrange(NUM_STEPS)}")
            trainer.train()
            num_kills += 1
        found = Trained(trainer.state_dict()["models"])
    apart = difference(found, trained(Classifier, num_kills, **machine.alone))
    assert apart < 10 * TOLERANCE["fp32"], apart
    return {"kills": num_kills, "difference": apart}


PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from raysgd.callbacks import Checkpointing
from raysgd.torch import TorchTrainer
from tests.gpu.cases import NUM_STEPS, Machine
from tests.gpu.operators import Classifier
device, backend, folder = sys.argv[1:]
machine = Machine(device, backend, Path(folder))
death = {"place": "at the end of the batch", "rank": 0, "step": NUM_STEPS + 3, "once": folder + "/stopped"}
death |= {"pid": os.getpid(), "signal": signal.SIGTERM}
options = {"config": {"death": death}, "split_batches": True, **machine.options(2)}
with TorchTrainer(training_operator_cls=Classifier, **options) as trainer:
    trainer.fit(3, callbacks=[Checkpointing(folder + "/saved")], resume_from="auto")
    torch.save(trainer.state_dict()["models"], folder + "/weights")
"""


def stop_and_resume(machine: Machine) -> dict[str, Any]:
    """SIGTERM to the program stops it after a step; the next program goes on with the next sample."""
    machine.check(2)
    expected = trained(Classifier, 3, **machine.alone)
    command = [sys.executable, "-c", PROGRAM, machine.device, machine.backend, str(machine.folder)]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 128 + signal.SIGTERM, first.stderr[-2000:]
    assert second.returncode == 0, second.stderr[-2000:]
    found = Trained(torch.load(machine.folder / "weights"))
    assert difference(found, expected) < TOLERANCE["fp32"], difference(found, expected)
    return {"left": first.stderr.splitlines()[-1], "difference": difference(found, expected)}


# ------------------------------------------------------------------------------------------------ sharded models


def sharded(machine: Machine, before: int, after: int) -> dict[str, Any]:
    """Train on some ranks, save, load into another number of ranks, and train on."""
    options = {"strategy": "fsdp", "strategy_options": {"min_block_parameters": 1}}
    path, weights = machine.folder / "sharded", []
    for num_workers in (before, after):
        with TorchTrainer(training_operator_cls=Classifier, **options, **machine.options(num_workers)) as trainer:
            if path.exists():
                trainer.load(path)
                weights.append(trainer.state_dict()["models"][0])
            trainer.train()
            if not path.exists():
                weights.append(trainer.state_dict()["models"][0])
                trainer.save(path)
    saved, loaded = weights
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    return {"ranks": [before, after]}


def sharded_loss(machine: Machine, num_workers: int) -> dict[str, Any]:
    options = {"strategy": "fsdp", "strategy_options": {"min_block_parameters": 1}, **machine.options(num_workers)}
    with TorchTrainer(training_operator_cls=Classifier, **options) as trainer:
        trainer.train()
        kill_worker(trainer, 1, "step:3")
        result = trainer.train()
        events = [event.kind for event in trainer.status().events if event.is_failure]
    assert len(events) == 1, events
    assert result["epoch"] == 2
    return {"events": events}


# ------------------------------------------------------------------------------------------------ the rest


def compiled(machine: Machine, num_workers: int) -> dict[str, Any]:
    expected = trained(Classifier, 2, **machine.alone)
    found = trained(Classifier, 2, compile=True, **machine.options(num_workers))
    assert difference(found, expected) < TOLERANCE["fp32"] * 10
    return {"difference": difference(found, expected)}


def _function(config: dict[str, Any]) -> list[float]:
    model = train.torch.prepare_model(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.module.weight)
    device = train.torch.get_device()
    model(torch.full((1, 1), 1.0 + train.world_rank(), device=device)).sum().backward()
    train.report(gradient=model.module.weight.grad.item(), device=device.type)
    return [model.module.weight.grad.item()]


def functions(machine: Machine, num_workers: int) -> dict[str, Any]:
    machine.check(num_workers)
    use_gpu = machine.device == "cuda"
    resources = {"CPU": 0.5, **({"GPU": machine.share(num_workers)} if use_gpu else {})}
    trainer = train.Trainer(TorchConfig(machine.backend), num_workers, use_gpu, resources)
    trainer.start()
    try:
        found = trainer.run(_function, {})
    finally:
        trainer.shutdown()
    mean = (num_workers + 1) / 2
    assert found == [[mean]] * num_workers
    scaling = ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources)
    fit = train.torch.TorchTrainer(
        _fit_function, scaling_config=scaling, torch_config=TorchConfig(machine.backend), train_loop_config={}
    ).fit()
    assert fit.metrics["gradient"] == mean
    assert fit.metrics["device"] == machine.device
    return {"gradient": mean}


def _fit_function(config: dict[str, Any]) -> None:
    model = train.torch.prepare_model(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.module.weight)
    device = train.torch.get_device()
    rank = train.get_context().get_world_rank()
    model(torch.full((1, 1), 1.0 + rank, device=device)).sum().backward()
    train.report({"gradient": model.module.weight.grad.item(), "device": device.type})


def labels_over_gloo(machine: Machine) -> dict[str, Any]:
    """Class weights on GPUs with gloo: a rank whose batch is padding sums with the others."""
    return numbers(Machine(machine.device, "gloo", machine.folder), 2, "fp32")


# ------------------------------------------------------------------------------------------------ all of them


@dataclass(frozen=True)
class Case:
    """A case of a part.

    Attributes:
        part: Number of the part, from 1.
        name: What it shows.
        run: Runs it.
        limit_s: Seconds after which it counts as hanging.
    """

    part: int
    name: str
    run: Callable[[Machine], dict[str, Any]]
    limit_s: float = 60.0


CASES = (
    Case(1, "an all-reduce of 2 ranks", partial(all_reduce, num_ranks=2)),
    Case(1, "an all-reduce of 4 ranks", partial(all_reduce, num_ranks=4)),
    Case(1, "an abort after a kill in an all-reduce of 2 ranks", partial(abort_after_a_kill, num_ranks=2), 90),
    Case(1, "an abort after a kill in an all-reduce of 4 ranks", partial(abort_after_a_kill, num_ranks=4), 90),
    Case(1, "`shrink_group` after a kill of 4 ranks", partial(abort_after_a_kill, num_ranks=4, shrinks=True), 90),
    *(
        Case(2, f"numbers of {size} ranks in {precision}", partial(numbers, num_workers=size, precision=precision), 100)
        for size in (2, 4)
        for precision in ("fp32", "bf16", "fp16")
    ),
    Case(2, "numbers of 8 ranks in fp32", partial(numbers, num_workers=8, precision="fp32"), 120),
    Case(3, "a kill before and inside the forward pass", partial(die_at_places, places=PLACES[:2])),
    Case(3, "a kill inside the first and the last bucket", partial(die_at_places, places=PLACES[2:4])),
    Case(3, "a kill before, in and after the optimizer's step", partial(die_at_places, places=PLACES[4:7]), 90),
    Case(3, "a kill at the end of a batch", partial(die_at_places, places=PLACES[7:])),
    Case(3, "a kill in a copy of the state", kill_in_a_copy),
    Case(3, "a kill in the hand-over to a new worker", kill_in_the_hand_over, 90),
    Case(3, "a frozen worker", freeze, 90),
    Case(3, "a spare steps in", spare),
    Case(3, "growth back to 2", growth),
    Case(3, "4 -> 3", partial(kill_several, num_workers=4, num_killed=1)),
    Case(3, "8 -> 5", partial(kill_several, num_workers=8, num_killed=3), 120),
    Case(
        3,
        "a kill between the steps of two optimizers in fp16",
        partial(die_at_places, places=PLACES[6:7], operator_cls=GAN, precision="fp16"),
    ),
    Case(3, "SIGTERM to the program", stop_and_resume),
    Case(3, "a kill in forming the new group", kill_in_a_new_group, 150),  # the last, because NCCL may wait in vain
    Case(4, "FSDP: 2 ranks, then 4", partial(sharded, before=2, after=4)),
    Case(4, "FSDP: 4 ranks, then 2", partial(sharded, before=4, after=2)),
    Case(4, "FSDP: a kill", partial(sharded_loss, num_workers=2)),
    Case(5, "compile=True", partial(compiled, num_workers=2), 120),
    Case(5, "functions and fit()", partial(functions, num_workers=2)),
    Case(5, "class weights over gloo", labels_over_gloo, 100),
    Case(5, "random kills of 4 ranks", partial(random_kills, num_workers=4, seconds=45.0), 120),
)
