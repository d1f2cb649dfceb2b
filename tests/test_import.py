"""What importing the package does, and does not do, in an interpreter that has imported nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd

ROOT = Path(raysgd.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "ray", "numpy", "horovod"}
NUM_TRIES = 5
IMPORT_BUDGET_S = 0.3

# A process for each module, forked from one that has loaded what takes long and is not of the package.
PRELOADED = ["ray", "torch"]


def run_fresh(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT.parent)


def least_work_s(module: str) -> float:
    """Seconds of a processor that importing it takes; those of the clock would count what else the machine does."""
    source = f"import time; began = time.process_time(); import {module}; print(time.process_time() - began)"
    return min(float(run_fresh(source).stdout) for _ in range(NUM_TRIES))


def test_importing_the_package_loads_no_framework() -> None:
    loaded = run_fresh("import sys, raysgd; print(*{name.partition('.')[0] for name in sys.modules})")
    loaded.check_returncode()
    assert FRAMEWORKS & set(loaded.stdout.split()) == set()


def test_importing_the_package_is_quick() -> None:
    assert least_work_s("raysgd") < IMPORT_BUDGET_S


def test_public_names_load_from_where_they_are_defined() -> None:
    source = "import raysgd; print(raysgd.TrainingOperator.__module__, 'TrainingOperator' in vars(raysgd))"
    result = run_fresh(source)
    assert result.stdout.split() == ["raysgd.torch.training_operator", "True"], result.stderr


def test_completion_shows_the_public_names_and_nothing_else() -> None:
    packages = {name for name in dir(raysgd) if name not in raysgd.__all__}
    assert set(raysgd.__all__) <= set(dir(raysgd))
    assert {"callbacks", "data", "operators", "tf", "torch", "train", "tune"} <= packages
    assert packages & {"Any", "TYPE_CHECKING", "annotations", "engine", "lazy_names", "os", "worker"} == set()


def test_every_public_module_of_functions_is_an_attribute_of_the_package() -> None:
    source = "import pkgutil, raysgd.train as t; print({m.name for m in pkgutil.iter_modules(t.__path__)} - {*dir(t)})"
    missing = ast.literal_eval(run_fresh(source).stdout)
    assert {name for name in missing if not name.startswith("_")} == set()


NAMES = [
    "raysgd.train.Trainer",
    "raysgd.train.torch.prepare_model",
    "raysgd.air.session.report",
    "raysgd.air.callbacks",
    "raysgd.torch.TorchTrainer",
    "raysgd.tf.TFTrainer",
    "raysgd.v2.Trainer",
    "raysgd.v2.SGDCallback",
    "raysgd.operators.GANOperator",
    "raysgd.tune",
    "raysgd.utils.BATCH_SIZE",
    "raysgd.exceptions.WorkerError",
]
# A process for each name, like the modules above.
TAKES_EACH_NAME = """
import importlib, os, sys
for name in {preloaded}:
    importlib.import_module(name)
for name in {names}:
    if os.fork() == 0:
        import raysgd
        try:
            eval(name)
            print(name, "operators" in dir(raysgd), flush=True)
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def taken() -> dict[str, str]:
    """What came of each name, taken right behind `import raysgd`."""
    result = run_fresh(TAKES_EACH_NAME.format(names=NAMES, preloaded=PRELOADED))
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_modules_can_be_written_behind_the_name_of_the_package(name: str, taken: dict[str, str]) -> None:
    assert taken[name] == "True"


def test_the_packages_behind_its_name_load_no_framework() -> None:
    names = "air, raysgd.data, raysgd.operators, raysgd.tf, raysgd.torch, raysgd.train, raysgd.tune, raysgd.v2"
    loaded = run_fresh(
        f"import sys, raysgd; raysgd.{names}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    loaded.check_returncode()
    assert {"torch", "tensorflow", "keras", "ray"} & set(loaded.stdout.split()) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module `raysgd` has no attribute `TorchTrianer`"):
        _ = raysgd.TorchTrianer


def test_the_former_name_of_the_trainer_refuses_and_names_the_new_one() -> None:
    with pytest.raises(DeprecationWarning, match=r"use `raysgd\.TorchTrainer`"):
        raysgd.PyTorchTrainer(model_creator=None)


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", raysgd.__version__)
