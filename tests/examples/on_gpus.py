"""What programs ask for, as they stand, where Ray has some GPUs; a program of its own.

    python -m tests.examples.on_gpus 0,1,2 NAME...

The machine needs no GPU: Ray is told that there are some, and PyTorch seems to see them, but only while the trainer
chooses. Each program ends as soon as Ray has granted what it asks for. It prints a line of JSON for each
number of GPUs and program: how many workers it asked for, with which resources, and over which backend they would have
talked.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch

from raysgd.air import config
from raysgd.core.cluster import resources
from raysgd.core.cluster.resources import GpuChoice
from raysgd.core.engine import placement
from raysgd.torch.driver import arguments
from raysgd.train._torch import process_group
from tests.docs.test_docs import ROOT, program, python_blocks
from tests.helpers.forked import lent_forks
from tests.helpers.ray_start import patient_ray
from tests.helpers.vision import put_torchvision

SETUP = """
from raysgd import train
from raysgd.tf import TFTrainer
from raysgd.train import ScalingConfig, Trainer
from raysgd.train.torch import TorchTrainer

def nothing(config=None):
    return None
"""
WRITTEN = {
    "functions": "trainer = Trainer('torch', num_workers=2, use_gpu='auto'); trainer.start()",
    "fit": "TorchTrainer(nothing, scaling_config=ScalingConfig(num_workers=2, use_gpu='auto')).fit()",
    "keras": "TFTrainer(nothing, nothing, num_workers=2, use_gpu='auto')",
    "doctor": "from raysgd.cli.self_test import trained_weights; trained_weights(num_workers=2)",
}
"""Programs that no page has, by name."""


class Granted(BaseException):
    """Ends a program where its workers would start."""


def source_of(name: str) -> str:
    if name in WRITTEN:
        return SETUP + WRITTEN[name]
    path = ROOT / name
    if path.suffix == ".md":
        return program(python_blocks(path, "python"))
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        lines = [line for cell in cells for line in [*"".join(cell["source"]).splitlines(), ""]]
        return "\n".join(line for line in lines if not line.startswith(("%", "!")))
    return path.read_text(encoding="utf-8")


def run(name: str, num_gpus: int) -> dict[str, Any]:
    """Run a program in an empty folder up to where its workers would start."""
    made: list[GpuChoice] = []
    choose, wait = resources.choose_gpus, placement.Reservation.wait

    def seen(function: Callable[..., GpuChoice]) -> Callable[..., GpuChoice]:
        def choosing(*args: Any, **options: Any) -> GpuChoice:
            made.append(function(*args, **options))
            return made[-1]

        return choosing

    def granted(self: placement.Reservation, *args: Any, **options: Any) -> None:
        wait(self, *args, **options)
        self.close(20.0)
        raise Granted(len(self), self._need.bundle())

    def with_gpus(function: Callable[[], Any]) -> Any:
        def viewing(*args: Any) -> Any:
            with (
                mock.patch.object(torch.cuda, "is_available", return_value=num_gpus > 0),
                mock.patch.object(torch.cuda, "device_count", return_value=num_gpus),
            ):
                return function(*args)

        return viewing

    view = with_gpus(arguments.view_of_driver)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(resources, "choose_gpus", seen(choose)),
        mock.patch.object(config, "choose_gpus", seen(choose)),
        mock.patch.object(placement.Reservation, "wait", granted),
        mock.patch.object(arguments, "view_of_driver", view),
        mock.patch.object(process_group, "view_of_driver", view),
        mock.patch.object(ray, "init"),
        mock.patch.object(sys, "argv", ["program.py", *(["--smoke-test"] * name.endswith("survive.py"))]),
    ):
        before = Path.cwd()
        script = Path(folder) / "program.py"
        script.write_text(source_of(name), encoding="utf-8")
        if name.endswith("image_folder.py"):
            put_torchvision(Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Granted as found:
            num_workers, bundle = found.args
            return {"workers": num_workers, "bundle": bundle, "backend": made[-1].backend if made else None}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            sys.path.remove(folder)
            os.chdir(before)
    return {"error": "it asked for no workers"}


def main() -> None:
    for num_gpus in map(int, sys.argv[1].split(",")):
        with lent_forks().starting(), patient_ray():
            ray.init(num_cpus=8, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
        for name in sys.argv[2:]:
            print(json.dumps({"num_gpus": num_gpus, "name": name, **run(name, num_gpus)}), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
