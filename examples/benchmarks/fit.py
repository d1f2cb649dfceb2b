"""`fit()` compared with Ray Train: start-up, a report, a checkpoint, and the failure of a worker.

    python examples/benchmarks/fit.py [--smoke-test] [--num-workers 2] [--repetitions 3] [--peers ray_train]

Start-up: seconds from the call of `fit()` until the function has begun on all workers, with everything imported
before and the cluster running. A report: seconds for which it blocks the function, and seconds until the driver has
it. A checkpoint: seconds for which reporting a folder of 200 MiB blocks the function, the first time and later, and
for raysgd also a dict with the same state. Reports without a pause: seconds for each of many reports with nothing
between them, on 2 and on 8 workers. A loss: seconds from the SIGKILL of a worker until the function has begun again
on all workers.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _functions as functions
from _common import (
    MIB,
    OWN,
    RAY_TRAIN_FAST_POLL,
    Report,
    Target,
    choose_peers,
    dispatch,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)

PEERS = {"ray_train": "ray.train", "ray_train_fast_poll": "ray.train"}
_FIGURES = {
    "startup_s": "fit() -> function begins, s",
    "report_s": "report() in the function, s",
    "to_driver_s": "report() -> driver, s",
    "flat_out_2_s": "report() flat out, 2 workers, s",
    "flat_out_8_s": "report() flat out, 8 workers, s",
    "first_folder_s": "first folder of 200 MiB, s",
    "folder_s": "later folder, s",
    "first_dict_s": "first dict of 200 MiB, s",
    "dict_s": "later dict, s",
    "recovery_s": "SIGKILL -> function begins again, s",
}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def _report_often(report: Callable[[dict[str, Any]], None], num_reports: int) -> list[float]:
    """Return how long each of several reports blocked the function; each contains when it was sent."""
    stalls = []
    for _ in range(num_reports):
        time.sleep(0.01)  # like a training, which does more than report
        sent = time.time()
        report({"sent": sent})
        stalls.append(time.time() - sent)
    return stalls


def _note(folder: str, name: str, values: Any) -> None:
    Path(folder, name).write_text(json.dumps(values))


def _begun_s(folder: Path) -> float:
    """Return when the function had begun on all workers."""
    return max(float(path.read_text()) for path in folder.glob("begun_*"))


def _figures(folder: Path, delays: list[float], called_at: float) -> dict[str, float]:
    """Return the figures of one contender, from the notes of its functions."""
    found = {
        "startup_s": _begun_s(folder) - called_at,
        "report_s": statistics.median(json.loads((folder / "reports").read_text())),
        "to_driver_s": statistics.median(delays),
        "recovery_s": functions.recovery_s(folder),
    }
    for path in folder.glob("flat_out_*"):
        found[f"{path.name}_s"] = float(path.read_text())
    for kind in ("folder", "dict"):
        if (folder / f"{kind}s").exists():
            found[f"first_{kind}_s"], *later = json.loads((folder / f"{kind}s").read_text())
            found[f"{kind}_s"] = statistics.median(later)
    return found


def _save_folders(state: dict[str, Any], save: Callable[[str], None], pause_s: float) -> list[float]:
    import torch

    def save_folder() -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / "state.pt")
            save(folder)

    return functions.stalls(save_folder, pause_s)


# The functions are the same for both: `library` provides what they call.


def _begin(library: Any, config: dict[str, Any]) -> None:
    rank = library.get_context().get_world_rank()
    Path(config["folder"], f"begun_{rank}").write_text(str(time.time()))


def _report_and_save(library: Any, config: dict[str, Any]) -> None:
    folder = config["folder"]
    _note(folder, "reports", _report_often(library.report, config["num_reports"]))
    state = functions.state_of(config["num_bytes"])

    def save(path: str) -> None:
        library.report({"saved": True}, checkpoint=library.Checkpoint.from_directory(path))

    _note(folder, "folders", _save_folders(state, save, config["pause_s"]))
    if hasattr(library.Checkpoint, "from_dict"):
        checkpoint = library.Checkpoint.from_dict(state)
        _note(
            folder,
            "dicts",
            functions.stalls(lambda: library.report({"saved": True}, checkpoint=checkpoint), config["pause_s"]),
        )


def _report_flat_out(library: Any, config: dict[str, Any]) -> None:
    context, num_reports = library.get_context(), config["num_flat_out"]
    library.report({"number": -1})
    began = time.perf_counter()
    for number in range(num_reports):
        library.report({"number": number})
    if context.get_world_rank() == 0:
        seconds = (time.perf_counter() - began) / num_reports
        _note(config["folder"], f"flat_out_{context.get_world_size()}", seconds)


def _lose(library: Any, config: dict[str, Any]) -> None:
    context = library.get_context()
    if functions.die_or_note(Path(config["folder"]), context.get_world_rank(), context.get_world_size()):
        time.sleep(60)


def _own_library() -> Any:
    from raysgd import train

    return train


def _ray_library() -> Any:
    import ray.train

    return ray.train


def _bound(function: Callable[..., None], library: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    def loop(config: dict[str, Any]) -> None:
        function(library(), config)

    return loop


def run_raysgd(num_workers: int, **sizes: Any) -> dict[str, float]:
    """Run `fit` of raysgd."""
    from raysgd.train import FailureConfig, RunConfig, ScalingConfig
    from raysgd.train.torch import TorchTrainer

    delays: list[float] = []

    def note(trial_id: str, metrics: dict[str, Any]) -> bool:
        if "sent" in metrics:
            delays.append(time.time() - metrics["sent"])
        return False

    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        ray_cluster(_most(num_workers, sizes), object_store_mib=1024),
    ):

        def fit(run: str, function: Callable[..., None], workers: int, **options: Any) -> float:
            trainer = TorchTrainer(
                _bound(function, _own_library),
                train_loop_config={"folder": name, **sizes},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(name=f"run_{run}", storage_path=name, **options),
            )
            called_at = time.time()
            trainer.fit()
            return called_at

        called_at = fit("begin", _begin, num_workers)
        fit("reports", _report_and_save, 1, stop=note)
        for workers in sizes["flat_out_on"]:
            fit(f"flat_out_{workers}", _report_flat_out, workers)
        fit("loss", _lose, num_workers, failure_config=FailureConfig(max_failures=1))
        return _figures(Path(name), delays, called_at)


def run_ray_train(num_workers: int, **sizes: Any) -> dict[str, float]:
    """Run the current Ray Train; its callbacks run in its controller."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    class Note(UserCallback):
        def __init__(self, path: Path) -> None:
            self.path = path

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            if "sent" in metrics[0]:
                with open(self.path, "a") as file:
                    file.write(f"{time.time() - metrics[0]['sent']}\n")

    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        ray_cluster(_most(num_workers, sizes) + 1, object_store_mib=1024),
    ):

        def fit(run: str, function: Callable[..., None], workers: int, **options: Any) -> float:
            trainer = TorchTrainer(
                _bound(function, _ray_library),
                train_loop_config={"folder": name, **sizes},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(name=f"run_{run}", storage_path=name, **options),
            )
            called_at = time.time()
            trainer.fit()
            return called_at

        called_at = fit("begin", _begin, num_workers)
        fit("reports", _report_and_save, 1, callbacks=[Note(Path(name, "delays"))])
        for workers in sizes["flat_out_on"]:
            fit(f"flat_out_{workers}", _report_flat_out, workers)
        fit("loss", _lose, num_workers, failure_config=FailureConfig(max_failures=1))
        delays = [float(line) for line in Path(name, "delays").read_text().split()]
        return _figures(Path(name), delays, called_at)


def _most(num_workers: int, sizes: dict[str, Any]) -> int:
    return max(num_workers, *sizes["flat_out_on"])


ROLES = {OWN: run_raysgd, "ray_train": run_ray_train, "ray_train_fast_poll": run_ray_train}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    sizes: dict[str, Any] = {"num_reports": 200, "num_bytes": 200 * MIB, "pause_s": 3.0}
    sizes |= {"num_flat_out": 1000, "flat_out_on": [2, 8]}
    if arguments.smoke_test:
        arguments.repetitions, sizes = 1, {"num_reports": 5, "num_bytes": 4 * MIB, "pause_s": 0.1}
        sizes |= {"num_flat_out": 100, "flat_out_on": [2]}
    report = Report("fit", arguments, peers)
    jobs = {}
    for name in (OWN, *peers.selected):
        few = {name: min(sizes[name], 10) for name in ("num_reports", "num_flat_out")}
        own_sizes = sizes if name == OWN else {**sizes, **few}
        jobs[name] = functools.partial(
            run_job,
            __file__,
            name,
            environment=_ENVIRONMENTS.get(name),
            num_workers=arguments.num_workers,
            **own_sizes,
        )
    runs = take_turns(jobs, arguments.repetitions, report)
    medians = report.figures("`fit()`", _FIGURES, runs)
    report.finish(
        [
            Target("report to the driver, s", 0.002, True, medians[OWN, "to_driver_s"]),
            Target("raysgd / Ray Train, start-up", 0.30, True, _ratio(medians, "startup_s")),
            Target("raysgd / Ray Train, report in the function", 0.05, True, _ratio(medians, "report_s")),
            Target("raysgd / Ray Train, report flat out on 2 workers", 0.05, True, _ratio(medians, "flat_out_2_s")),
            Target("raysgd / Ray Train, later folder of 200 MiB", 1.0, True, _ratio(medians, "folder_s")),
            Target("raysgd / Ray Train, recovery", 0.40, True, _ratio(medians, "recovery_s")),
        ]
    )


def _ratio(medians: dict[tuple[str, str], float], figure: str) -> float | None:
    other = medians.get(("ray_train", figure))
    return None if other is None else medians[OWN, figure] / other


if __name__ == "__main__":
    main()
