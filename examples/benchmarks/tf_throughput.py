"""TensorFlow: images per second of Keras's `fit` on several workers, and the time to the first step and after a
failure.

    python examples/benchmarks/tf_throughput.py [--smoke-test] [--num-workers 2] [--repetitions 5] [--peers by_hand]

The contenders train the same compiled models on the same data in memory, with the same global batch size: raysgd with
Keras 3 and with tf_keras, over gloo, and with tf_keras under a `MultiWorkerMirroredStrategy`; a hand-written script
with that strategy; and Ray Train's `TensorflowTrainer`. The last two need tf_keras. Every repetition is a separate
program, and the contenders take turns. The first epoch of each run is not measured.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import (
    OWN,
    RAY_TRAIN_FAST_POLL,
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

PEERS = {"by_hand": "tf_keras", "ray_train": "ray.train"}
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
_ENVIRONMENTS = {
    f"{OWN}_keras3": QUIET,
    f"{OWN}_keras2": {**QUIET, **KERAS_2},
    "by_hand": {**QUIET, **KERAS_2},
    "ray_train": {**QUIET, **KERAS_2, **RAY_TRAIN_FAST_POLL},
}


@dataclass(frozen=True)
class Workload:
    """A model, the global batch size, and the length of an epoch."""

    name: str
    batch_size: int
    num_steps: int
    num_epochs: int = 3


WORKLOADS = {
    "mlp": Workload("mlp", batch_size=512, num_steps=30),
    "cnn": Workload("cnn", batch_size=128, num_steps=30),
    "tiny": Workload("tiny", batch_size=64, num_steps=100),
    "smoke": Workload("tiny", batch_size=8, num_steps=2, num_epochs=1),
}


def make_model(config: dict[str, Any]) -> Any:
    """Return a compiled model for images of 28x28."""
    import tensorflow as tf

    layers = tf.keras.layers
    body = {
        "mlp": [layers.Flatten(), layers.Dense(1024, "relu"), layers.Dense(1024, "relu"), layers.Dense(512, "relu")],
        "cnn": [
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
        ],
        "tiny": [layers.Flatten(), layers.Dense(16, "relu")],
    }[config["workload"]]
    model = tf.keras.Sequential([layers.Input([28, 28, 1]), *body, layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)
    return model


def make_data(config: dict[str, Any]) -> tuple[Any, None]:
    """Return random images and labels; a few batches are repeated."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    images = generator.standard_normal((4 * config["batch_size"], 28, 28, 1), dtype="float32")
    labels = generator.integers(0, 10, len(images))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
    return dataset.batch(config["batch_size"], drop_remainder=True), None


def config_of(workload: Workload) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "fit_config": {"steps_per_epoch": workload.num_steps, "verbose": 0},
    }


def speed(workload: Workload, seconds: float) -> float:
    return workload.batch_size * workload.num_steps * workload.num_epochs / seconds


# ------------------------------------------------------------------------------------------------------ contenders


def run_raysgd(workload: str, num_workers: int, recovers: bool = False) -> dict[str, float]:
    """Run a trainer; `train` is timed from outside, with everything that it does besides `fit`."""
    import ray  # noqa: F401

    from raysgd import TFTrainer

    load = WORKLOADS[workload]
    with ray_cluster(num_workers):
        began = time.monotonic()
        options = {"config": config_of(load), "num_replicas": num_workers}
        with TFTrainer(make_model, make_data, **options) as trainer:
            trainer.train(num_steps=1)
            first_step_s = time.monotonic() - began
            trainer.train()
            began = time.monotonic()
            for _ in range(load.num_epochs):
                trainer.train()
            found = {"images_per_s": speed(load, time.monotonic() - began), "first_step_s": first_step_s}
            if recovers:
                os.kill(trainer.apply_all_workers(os.getpid)[-1], signal.SIGKILL)
                began = time.monotonic()
                trainer.train(num_steps=1)
                found["recovery_s"] = time.monotonic() - began
    return found


def run_by_hand(workload: str, num_workers: int) -> dict[str, float] | None:
    """Run one process of a script with a strategy; torchrun only starts the processes and sets their ranks."""
    began, rank, port = time.monotonic(), int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    workers = [f"127.0.0.1:{port + 1 + index}" for index in range(num_workers)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    return _fit_with_strategy(WORKLOADS[workload], began)


def _fit_with_strategy(load: Workload, began: float) -> dict[str, float]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    config = config_of(load)
    data, _ = make_data(config)
    with strategy.scope():
        model = make_model(config)
    model.fit(data, **{**config["fit_config"], "steps_per_epoch": 1})
    first_step_s = time.monotonic() - began
    model.fit(data, **config["fit_config"])
    began = time.monotonic()
    for _ in range(load.num_epochs):
        model.fit(data, **config["fit_config"])
    return {"images_per_s": speed(load, time.monotonic() - began), "first_step_s": first_step_s}


def run_ray_train(workload: str, num_workers: int) -> dict[str, float]:
    """Run the same script as Ray Train's function; the time to the first step starts with the call of `fit`."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    with ray_cluster(num_workers + 1), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        TensorflowTrainer(
            _ray_train_loop,
            train_loop_config={"workload": workload, "began": time.monotonic(), "folder": folder},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder, name="tf"),
        ).fit()
        found: dict[str, float] = json.loads((Path(folder) / "found.json").read_text())
    return found


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    found = _fit_with_strategy(WORKLOADS[config["workload"]], config["began"])
    if ray.train.get_context().get_world_rank() == 0:
        (Path(config["folder"]) / "found.json").write_text(json.dumps(found))


ROLES = {OWN: run_raysgd, "by_hand": run_by_hand, "ray_train": run_ray_train}


# ------------------------------------------------------------------------------------------------------ report


def jobs_for(workload: str, num_workers: int, peers: tuple[str, ...], is_first: bool) -> dict[str, Any]:
    """Return the contenders of a workload; losses are measured only with the first workload."""

    def job(name: str, role: str, **parameters: Any) -> Any:
        parameters = {"workload": workload, "num_workers": num_workers, **parameters}
        return functools.partial(run_job, __file__, role, environment=_ENVIRONMENTS[name], **parameters)

    jobs = {f"{OWN}_keras3": job(f"{OWN}_keras3", OWN, recovers=is_first)}
    if workload != "smoke":
        jobs[f"{OWN}_keras2"] = job(f"{OWN}_keras2", OWN)
    for peer in peers:
        jobs[peer] = job(peer, peer, **({"processes": num_workers} if peer == "by_hand" else {}))
    return jobs


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=5, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    if arguments.smoke_test:
        arguments.repetitions = 1
    report = Report("tf_throughput", arguments, peers)
    workloads = ["smoke"] if arguments.smoke_test else ["mlp", "cnn", "tiny"]
    medians: dict[tuple[str, str, str], float] = {}
    for workload in workloads:
        is_first = workload == workloads[0]
        jobs = jobs_for(workload, arguments.num_workers, peers.selected, is_first)
        runs = take_turns(jobs, arguments.repetitions, report)
        figures = ["images_per_s", "first_step_s", *(["recovery_s"] if is_first else [])]
        rows = []
        for name, found in runs.items():
            cells = []
            for figure in figures:
                samples = [run[figure] for run in found if figure in run]
                value = estimate(samples) if samples else None
                if value is not None:
                    report.result(name, figure, value, workload=workload, num_workers=arguments.num_workers)
                    medians[workload, name, figure] = value.median
                cells.append(value.text() if value is not None else "-")
            rows.append([name, *cells])
        report.table(f"`{workload}` on {arguments.num_workers} workers", ["contender", *figures], rows)
    report.finish(targets(workloads, medians))


def targets(workloads: list[str], medians: dict[tuple[str, str, str], float]) -> list[Target]:
    """Compare raysgd with either Keras to both others, and its start-up to Ray Train's."""

    def ratio(workload: str, own: str, peer: str, figure: str) -> float | None:
        one, other = medians.get((workload, own, figure)), medians.get((workload, peer, figure))
        return None if one is None or other is None else one / other

    found = [
        Target(f"{own} / {peer}, {workload}, images/s", 0.99, False, ratio(workload, own, peer, "images_per_s"))
        for workload in workloads
        for own in (f"{OWN}_keras3", f"{OWN}_keras2")
        for peer in PEERS
    ]
    start = ratio(workloads[0], f"{OWN}_keras3", "ray_train", "first_step_s")
    return [*found, Target("raysgd / Ray Train, start to the first step", 0.4, True, start)]


if __name__ == "__main__":
    main()
