"""Validation in the background: how long training waits for it, and how much sooner a run ends.

    python examples/benchmarks/async_validation.py [--smoke-test] [--repetitions 1] [--peers ray_train]

"Stall" is the time from `validate(blocking=False)` until the next call can begin, with 200 MiB of state, two training
workers and an idle spare. "Slower step" is how much longer this and a step take than the step alone: while the state
is sent, the transfer shares the cores with the steps. "Beside to inline" is the time of such a validation, from the
call to its result, divided by that of `validate()`, with one worker for each and no training at the same time. A run
has 10 epochs, a third of whose time is validation; "run" is its time with `fit(validate="async")`, divided by that of
the same run inline: with data that sleeps on two workers, and with data that computes on one worker. One spare
validates in all of them.

Ray Train saves a checkpoint and reports it with `validation=True`, which runs a function in a task: its stall is the
time of saving and of the report, in rank 0. Its runs sleep like those of raysgd, and their state is small.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import NUM_CLASSES, STATES, WORKLOADS, Workload, sgd
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator

PEERS = {"ray_train": "ray.train"}
_FIGURES = {
    "stall_s": "stall, s",
    "slower_step_s": "slower step, s",
    "beside_to_inline": "beside to inline",
    "sleeping_run": "run, data that sleep",
    "computing_run": "run, data that compute",
}


class Samples(Dataset[Any]):
    """Random samples, each of which takes some time to load.

    Args:
        workload: Defines their shape.
        count: Number of samples.
        seconds: Seconds to load each sample.
    """

    def __init__(self, workload: Workload, count: int, seconds: float) -> None:
        self._features = torch.randn(count, *workload.input_shape)
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        return self._features[index], index % NUM_CLASSES


class Validated(TrainingOperator):
    """Trains a workload; the config has the number of samples, and the seconds for each."""

    def setup(self, config: dict[str, Any]) -> None:
        workload = {**WORKLOADS, **STATES}[config["workload"]]
        model = workload.model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=torch.nn.CrossEntropyLoss()
        )
        data = [Samples(workload, count, config["seconds"]) for count in (config["train"], config["validation"])]
        train, validation = (DataLoader(each, batch_size=config["batch_size"]) for each in data)
        self.register_data(train_loader=train, validation_loader=validation)


def make_trainer(num_workers: int, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Validated, config=config, num_workers=num_workers, spare_workers=1, use_gpu=False
    )


def seconds_of(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run_own(state: str, num_rounds: int, epochs: int, sleep_s: float, num_batches: int) -> dict[str, Any]:
    with ray_cluster(4, object_store_mib=2048):
        return {
            **stalls(state, num_rounds),
            "beside_to_inline": ratios_to_inline(num_rounds),
            "sleeping_run": run_ratio(
                epochs, 2, workload="mlp_tiny", seconds=sleep_s, train=40, validation=20, batch_size=5
            ),
            "computing_run": run_ratio(
                epochs, 1, workload="mlp_large", seconds=0.0, train=256 * num_batches, validation=512 * num_batches,
                batch_size=256,
            ),
        }  # fmt: skip


def stalls(state: str, num_rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"stall_s": [], "slower_step_s": []}
    with make_trainer(2, workload=state, seconds=0.0, train=4000, validation=1, batch_size=1) as trainer:
        step = functools.partial(trainer.train, num_steps=1)

        for _ in range(num_rounds + 2):
            alone_s = statistics.median(seconds_of(step) for _ in range(3))
            time.sleep(0.5)  # wait until the data that these steps have sent has arrived
            began = time.perf_counter()
            handle = trainer.validate(blocking=False)
            with trainer._life.controller.turns.take_turn():
                found["stall_s"].append(time.perf_counter() - began)
            step()
            found["slower_step_s"].append(time.perf_counter() - began - alone_s)
            handle.result()
    return {name: values[2:] for name, values in found.items()}


def ratios_to_inline(num_rounds: int) -> list[float]:
    data = {"workload": "mlp_large", "seconds": 0.0, "train": 256, "validation": 256 * 60, "batch_size": 256}
    with make_trainer(1, **data) as trainer:
        found = []
        for _ in range(num_rounds + 1):
            trainer.train()
            beside_s = seconds_of(lambda: trainer.validate(blocking=False).result())
            found.append(beside_s / seconds_of(trainer.validate))
    return found[1:]


def run_ratio(epochs: int, num_workers: int, **data: Any) -> float:
    """Return the time of a run with background validations, divided by that of a run that waits for them."""
    with make_trainer(num_workers, **data) as trainer, tempfile.TemporaryDirectory() as folder:
        trainer.fit(1, validate="async", folder=folder)  # waits for the spare
        began = time.perf_counter()
        trainer.fit(epochs, folder=folder)
        inline_s = time.perf_counter() - began
        began = time.perf_counter()
        trainer.fit(epochs, validate="async", folder=folder)
        return (time.perf_counter() - began) / inline_s


# ------------------------------------------------------------------------------------------------------ Ray Train


def run_ray_train(state: str, num_rounds: int, epochs: int, sleep_s: float, num_batches: int) -> dict[str, Any]:
    small = {"state": "small_state", "train_s": 20 * sleep_s, "validation_s": 10 * sleep_s, "epochs": epochs}
    with ray_cluster(4, object_store_mib=1024):
        inline_s = _ray_run({**small, "is_beside": False})["seconds"]
        beside_s = _ray_run({**small, "is_beside": True})["seconds"]
        large = {"state": state, "train_s": 1.0, "validation_s": 0.0, "epochs": num_rounds, "is_beside": True}
        return {"sleeping_run": beside_s / inline_s, "stall_s": _ray_run(large)["stalls"]}


def _ray_run(config: dict[str, Any]) -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer
    from ray.train.v2.api.validation_config import ValidationConfig

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        note = Path(folder) / "note.json"
        RayTrainer(
            _ray_loop,
            train_loop_config={**config, "note": str(note)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, name="run"),
            validation_config=ValidationConfig(fn=functools.partial(_ray_validate, seconds=config["validation_s"])),
        ).fit()
        ended = time.time()
        began, *stalls = map(float, note.read_text().split())
        return {"seconds": ended - began, "stalls": stalls}


def _ray_validate(checkpoint: Any, seconds: float) -> dict[str, float]:
    with checkpoint.as_directory() as folder:
        torch.load(Path(folder) / "state.pt")
    time.sleep(seconds)
    return {"val_loss": 0.0}


def _ray_loop(config: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    model = STATES[config["state"]].model()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    began, stalls = time.time(), []
    for _ in range(config["epochs"]):
        time.sleep(config["train_s"])
        stalls.append(seconds_of(lambda: _ray_report(config, rank, model, optimizer)))
    if rank == 0:
        Path(config["note"]).write_text(" ".join(map(str, [began, *stalls])))


def _ray_report(config: dict[str, Any], rank: int, model: Any, optimizer: Any) -> None:
    import ray.train

    if not config["is_beside"]:
        time.sleep(config["validation_s"])
        ray.train.report({"val_loss": 0.0})
        return
    checkpoint = None
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="bench-")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "state.pt")
        checkpoint = ray.train.Checkpoint.from_directory(folder)
    ray.train.report(
        {},
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        validation=rank == 0,
    )


ROLES = {OWN: run_own, "ray_train": run_ray_train}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=1, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    sizes = {"state": "large_state", "num_rounds": 8, "epochs": 10, "sleep_s": 0.05, "num_batches": 6}
    if arguments.smoke_test:
        arguments.repetitions = 1
        sizes = {"state": "small_state", "num_rounds": 1, "epochs": 2, "sleep_s": 0.001, "num_batches": 1}
    report = Report("async_validation", arguments, peers)
    jobs = {name: functools.partial(run_job, __file__, name, **sizes) for name in (OWN, *peers.selected)}
    medians = report.figures(
        "Validation beside the training", _FIGURES, take_turns(jobs, arguments.repetitions, report)
    )
    report.finish(
        [
            Target("stall, s", 0.06, True, medians.get((OWN, "stall_s"))),
            Target("a validation beside, over inline", 1.2, True, medians.get((OWN, "beside_to_inline"))),
            Target("a run, data that sleep, over inline", 0.8, True, medians.get((OWN, "sleeping_run"))),
            Target("a run, data that compute, over inline", 0.8, True, medians.get((OWN, "computing_run"))),
        ]
    )


if __name__ == "__main__":
    main()
