"""Population-based training: the cost of copying a better trial, and of reusing workers for another trial.

    python examples/benchmarks/population.py [--smoke-test] [--repetitions 3] [--peers ray_tune]

Two trials with two workers each train a state of 200 MiB, half of it momentum. "Copy" is the time in which the worse
trial receives the state of the better trial, in all its workers. "Gap" is the time from the end of the last step of
the worse trial before the copy to the beginning of its first step after it, with another learning rate. Through Ray
Tune, both are trials of its `PopulationBasedTraining`: for raysgd with `TorchTrainer.as_trainable` and
`reuse_actors`, for Ray Train as a function that calls `fit` for each interval, because Ray Train's reports pass no
checkpoints to Tune.

"New trial" is the time from `reset_config` to the end of the first step of another trial on the same workers, with a
model of 10 MB.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import MOMENTUM, STATES, HandWritten, StockOperator, config_of
from torch.nn.parallel import DistributedDataParallel

PEERS = {"ray_tune": "ray.train"}
NUM_WORKERS = 2
NUM_COPIES = 5
INTERVAL = 2  # epochs between two copies, in Tune
RATES = (0.001, 0.01)
THROUGH_TUNE = f"{OWN}, Ray Tune"
_FIGURES = {"copy_s": "copy, s", "gap_s": "gap, s", "new_trial_s": "new trial, s"}


# ------------------------------------------------------------------------------------------------------ stamps


def note(folder: str, trial: str, rate: float, began: float) -> None:
    """Record a step of a trial that has just ended."""
    with (Path(folder) / f"steps-{trial}").open("a") as file:
        file.write(json.dumps([rate, began, time.monotonic()]) + "\n")


def gaps(folder: str) -> list[float]:
    """For each copy, return the seconds between the step before and the step after it.

    Raises:
        RuntimeError: No trial went on with another rate.
    """
    found = []
    for path in Path(folder).glob("steps-*"):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        pairs = itertools.pairwise(steps)
        found += [began - ended for (before, _, ended), (now, began, _) in pairs if now != before]
    if not found:
        raise RuntimeError("no trial copied another one")
    return found


# ------------------------------------------------------------------------------------------------------ raysgd


class RatedOperator(StockOperator):
    """The stock loop with the learning rate of the config; records its steps if it has a folder."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        for group in self.optimizer.param_groups:
            group["lr"] = config["lr"]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        result = super().train_batch(batch, batch_info)
        if self.world_rank == 0 and "stamps" in self.config:
            note(self.config["stamps"], str(os.getpid()), self.config["lr"], began)
        return result


def make_trainer(config: dict[str, Any]) -> Any:
    from raysgd import TorchTrainer

    return TorchTrainer(training_operator_cls=RatedOperator, config=config, num_workers=NUM_WORKERS, use_gpu=False)


def run_population(workload: str, small_workload: str) -> dict[str, list[float]]:
    """Measure copies and new trials, without files."""
    from raysgd.tune.population import Population

    rates = iter(RATES)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(2 * NUM_WORKERS, object_store_mib=2048):
        space = {**config_of(STATES[workload], NUM_WORKERS, stamps=folder), "lr": lambda: next(rates)}
        with Population(make_trainer, space, 2, step=_step, metric="score", mode="max") as population:
            found = _copies(population)
        found["gap_s"] = gaps(folder)[1:]
    with ray_cluster(NUM_WORKERS):
        config = config_of(STATES[small_workload].with_steps(4), NUM_WORKERS)  # `setup` also creates the data
        with make_trainer({**config, "lr": RATES[0]}) as trainer:
            found["new_trial_s"] = [_new_trial(trainer, {**config, "lr": rate}) for rate in RATES * 3]
    return found


def _step(trainer: Any) -> dict[str, Any]:
    return {**trainer.train(num_steps=INTERVAL), "score": trainer.config["lr"]}


def _copies(population: Any) -> dict[str, list[float]]:
    """Measure copies alone, then copies with another config, as in `evolve`."""
    copies = []
    better, worse = population.members
    for number in range(NUM_COPIES):
        population.train()
        began = time.perf_counter()
        population.copy(worse, better)
        copies.append(time.perf_counter() - began)
        population.copy(worse, better, {**worse.config, "lr": RATES[0] / (number + 2)})
    population.train()
    return {"copy_s": copies[1:]}  # the first copy allocates memory for the state in each process


def _new_trial(trainer: Any, config: dict[str, Any]) -> float:
    began = time.perf_counter()
    trainer.reset_config(config)
    trainer.train(num_steps=1)
    return time.perf_counter() - began


def run_through_tune(workload: str, small_workload: str) -> dict[str, list[float]]:
    """Run the same trainers as trials of Ray Tune."""
    from raysgd import TorchTrainer

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(2 * (NUM_WORKERS + 1), 2048):
        trainable_cls = TorchTrainer.as_trainable(
            training_operator_cls=RatedOperator,
            config=config_of(STATES[workload], NUM_WORKERS),
            num_workers=NUM_WORKERS,
            use_gpu=False,
        )

        class Noting(trainable_cls):  # type: ignore[misc, valid-type]
            def step(self) -> dict[str, Any]:
                began = time.monotonic()
                result = _step(self.trainer)
                note(folder, self.trial_id, self.config["lr"], began)
                return result

        _run_tune(Noting, folder, {}, reuse_actors=True)
        return {"gap_s": gaps(folder)}


def _run_tune(trainable: Any, folder: str, config: dict[str, Any], *, reuse_actors: bool) -> None:
    """Run two trials, of which the second is worse and copies the first."""
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=INTERVAL,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": tune.uniform(1e-5, 1e-2)},
        resample_probability=0.0,
        synch=True,  # otherwise, on a busy machine, one trial ends before the other begins
    )
    tune.Tuner(
        trainable,
        param_space={**config, "lr": tune.grid_search(list(RATES))},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler, reuse_actors=reuse_actors),
        run_config=tune.RunConfig(
            storage_path=f"{folder}/tune", name="population", stop={"training_iteration": 3 * INTERVAL}, verbose=0
        ),
    ).fit()


# ------------------------------------------------------------------------------------------------------ Ray


def run_ray_tune(workload: str, small_workload: str) -> dict[str, list[float]]:
    """Run Ray Tune's population-based training over Ray Train."""
    from ray import tune

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(2 * NUM_WORKERS + 2, 2048):
        config = {"workload": workload, "folder": folder}
        _run_tune(tune.with_resources(_ray_trial, {"CPU": 1}), folder, config, reuse_actors=True)
        return {"gap_s": gaps(folder)}


def _ray_trial(config: dict[str, Any]) -> None:
    """Run a trial: one `fit` for each interval, each from the checkpoint of the previous interval."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    trial = tune.get_context().get_trial_id()
    checkpoint = tune.get_checkpoint()
    path = checkpoint.path if checkpoint is not None else None
    number = 0
    while True:
        number += 1
        result = RayTrainer(
            _ray_loop,
            train_loop_config={**config, "trial": trial, "path": path},
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=RunConfig(storage_path=f"{config['folder']}/train", name=f"{trial}-{time.time()}"),
        ).fit()
        path = result.checkpoint.path
        metrics = {"score": config["lr"]}
        for _ in range(INTERVAL - 1):
            tune.report(metrics)
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(path))


def _ray_loop(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    hand = HandWritten(STATES[config["workload"]], rank, NUM_WORKERS)
    if config["path"] is not None:
        state = torch.load(Path(config["path"]) / "last.pt", weights_only=True)
        hand.model.load_state_dict(state["model"])
        hand.optimizer.load_state_dict(state["optimizer"])
    for group in hand.optimizer.param_groups:
        group.update(lr=config["lr"], momentum=MOMENTUM)
    _take_steps(hand, config, rank)
    with tempfile.TemporaryDirectory() as place:
        if rank == 0:
            state = {"model": hand.model.state_dict(), "optimizer": hand.optimizer.state_dict()}
            torch.save(state, Path(place) / "last.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place) if rank == 0 else None)


def _take_steps(hand: HandWritten, config: dict[str, Any], rank: int) -> None:
    assert isinstance(hand.model, DistributedDataParallel)
    for _, (features, target) in zip(range(INTERVAL), hand.loader, strict=False):
        began = time.monotonic()
        hand.optimizer.zero_grad()
        hand.criterion(hand.model(features), target).backward()
        hand.optimizer.step()
        if rank == 0:
            note(config["folder"], config["trial"], config["lr"], began)
    dist.barrier()


# ------------------------------------------------------------------------------------------------------ report

ROLES = {OWN: run_population, THROUGH_TUNE: run_through_tune, "ray_tune": run_ray_tune}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    names = (OWN, THROUGH_TUNE, *peers.selected)
    workloads = {"workload": "large_state", "small_workload": "recovery"}
    if arguments.smoke_test:
        arguments.repetitions, names = 1, (OWN,)
        workloads = {"workload": "small_state", "small_workload": "recovery_tiny"}
    report = Report("population", arguments, peers)
    jobs: dict[str, Callable[[], Any]] = {
        name: functools.partial(run_job, __file__, name, **workloads) for name in names
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    report.finish(_targets(report.figures("A trial copies a better one", _FIGURES, runs)))


def _targets(medians: dict[tuple[str, str], float]) -> list[Target]:
    own, other = medians.get((THROUGH_TUNE, "gap_s")), medians.get(("ray_tune", "gap_s"))
    ratio = None if own is None or other is None else own / other
    return [
        Target(f"{OWN}: copy of 200 MiB, s", 0.15, True, medians.get((OWN, "copy_s"))),
        Target(f"{OWN}: new trial on the same workers, s", 0.3, True, medians.get((OWN, "new_trial_s"))),
        Target(f"{THROUGH_TUNE} / Ray Tune over Ray Train: gap", 0.25, True, ratio),
    ]


if __name__ == "__main__":
    main()
