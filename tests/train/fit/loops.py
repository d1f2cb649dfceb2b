"""Functions that `fit` runs in tests. They run in workers, which import this module."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from raysgd import train
from raysgd.air import Checkpoint
from raysgd.train import collective
from tests.train.lab import claim


def first_epoch() -> int:
    """Where a function goes on."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        file = Path(folder, "epoch")
        return int(file.read_text()) + 1 if file.exists() else checkpoint.to_dict()["epoch"] + 1


def count_epochs(config: dict[str, Any]) -> int:
    """Reports epochs from where it was left, with a checkpoint each; fails on rank 0 where it is told to."""
    context = train.get_context()
    rank = context.get_world_rank()
    for epoch in range(first_epoch(), config["num_epochs"]):
        if rank == 0 and epoch == config.get("fails_at") and claim(config["flag"]):
            raise KeyError(f"bad sample in epoch {epoch}")
        metrics = {
            "epoch": epoch,
            "loss": config.get("losses", [1.0] * 99)[epoch],
            "rank": rank,
            "size": context.get_world_size(),
            "pid_of_worker": os.getpid(),
            "node": _node(),
        }
        save(config, metrics, rank, epoch)
        time.sleep(config.get("epoch_s", 0))
        if epoch == config.get("stays_at") and claim(Path(f"{config['flag']}-{rank}")):
            time.sleep(600)  # until this worker is ended
    return 7


def ask_everything(config: dict[str, Any]) -> dict[str, Any]:
    """Asks the driver for all that there is, in step, behind reports that may be ahead of it."""
    import torch

    from raysgd.train.torch import get_devices

    rank = train.get_context().get_world_rank()
    for epoch in range(3):
        train.report({"epoch": epoch})
        train.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}) if rank == 1 else None)
    told = collective.broadcast_from_rank_zero({"rank": rank})
    collective.barrier()
    return {
        "told": [told["rank"], collective.broadcast_from_rank_zero(7 - rank)],
        "preemption": train.get_preemption_info(),
        "devices": [str(device) for device in get_devices()],
        "free": _free_cpus(config["free"]),
        "threads": np.array([torch.get_num_threads()]),
    }


def await_preemption() -> dict[str, Any]:
    """Waits until a node is announced to go away."""
    train.report({"epoch": 0})  # until then the driver would leave the node by itself
    while (info := train.get_preemption_info()) is None:
        time.sleep(0.1)
    return {
        "nodes": info.preempted_node_ids,
        "num_ranks": len(info.preempted_ranks),
        "is_soon": 0 < info.deadline_ms / 1000 - time.time() < 60,
    }


def _free_cpus(expected: float) -> float:
    """The free CPUs, as soon as they are as many as expected: Ray tells of them later."""
    import ray

    deadline = time.monotonic() + 30
    while (free := float(ray.available_resources().get("CPU", 0.0))) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def save(config: dict[str, Any], metrics: dict[str, Any], rank: int, epoch: int) -> None:
    """Reports, with a checkpoint of the kind that is asked for."""
    if config.get("kind", "dict") == "dict":
        payload = bytes(config.get("num_bytes", 0))  # made here: what is in the config is written with each report
        train.report(metrics, checkpoint=Checkpoint.from_dict({"epoch": epoch, "payload": payload}))
    else:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            Path(folder, f"rank_{rank}").write_text(str(epoch))
            Path(folder, "state").write_text(f"of rank {rank}" if "same_name" in config else "")
            if rank == 1 and epoch == config.get("dies_while_saving"):
                _die_while_saving(folder, config["flag"])
            train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def _die_while_saving(folder: str, flag: Path) -> None:
    """Makes sure that the death comes when a part of the checkpoint is stored and a part is not."""
    if not claim(flag):
        return
    for number in range(50):
        Path(folder, f"part_{number}").touch()
    num_copied = itertools.count()

    def watch(event: str, arguments: Any) -> None:
        if event == "shutil.copyfile" and next(num_copied) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def report_and_note(config: dict[str, Any]) -> None:
    """Reports numbers, and makes a file behind each report."""
    for number in range(config["num_reports"]):
        train.report({"number": number})
        Path(f"{config['flag']}-{train.get_context().get_world_rank()}-{number}").touch()


def report_flat_out(config: dict[str, Any]) -> None:
    """Reports many times with nothing between; one rank raises at the end."""
    rank = train.get_context().get_world_rank()
    for number in range(config["num_reports"]):
        train.report({"number": number, "rank": rank})
    if rank == 0 and config.get("raises"):
        raise KeyError("behind all reports")


def average_with_torch() -> None:
    """A collective of all ranks."""
    import torch

    rank = train.get_context().get_world_rank()
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    train.report({"total": total.item()})


def log_with_mlflow(config: dict[str, Any]) -> None:
    """Logs to MLflow from each worker, as the session of MLflow lets it."""
    from raysgd.air.integrations.mlflow import setup_mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow = setup_mlflow(
        {"num_epochs": config["num_epochs"]},
        tracking_uri=config["folder"],
        experiment_name="in_workers",
        create_experiment_if_not_exists=True,
    )
    mlflow.log_metric("rank", train.get_context().get_world_rank())
    train.report({"epoch": 0})
    mlflow.end_run()


def fit_with_keras(config: dict[str, Any]) -> None:
    """Trains with Keras, with the callback of today and with that of Ray 2.0."""
    if config["is_legacy"]:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import numpy as np
    import tensorflow as tf

    from raysgd.air.callbacks.keras import Callback
    from raysgd.air.integrations.keras import ReportCheckpointCallback

    assert ("tf_keras" in tf.keras.Model.__module__) == config["is_legacy"]
    model = tf.keras.Sequential([tf.keras.Input(shape=(1,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x = np.linspace(0, 1, 8).reshape(-1, 1)
    epochs, frequency = config["num_epochs"], config["frequency"]
    model.fit(x, 2 * x, epochs=epochs, verbose=0, callbacks=[ReportCheckpointCallback(metrics="loss")])
    former = Callback(metrics={"error": "loss"}, on=["epoch_end"], frequency=[frequency])
    model.fit(x, 2 * x, epochs=epochs, verbose=0, callbacks=[former])


def count_with_tensorflow() -> None:
    """The replicas of a strategy."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train.report({"total": strategy.num_replicas_in_sync})


def count_with_horovod() -> None:
    """The ranks of Horovod, by a collective."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    train.report({"total": int(hvd.allreduce(torch.ones(()), op=hvd.Sum))})
