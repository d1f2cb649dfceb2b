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


def run_fresh(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT.parent)


def test_importing_the_package_loads_no_framework() -> None:
    """Nor anything else that does not come with Python, so that it is quick."""
    source = "import sys; before = {*sys.modules}; import raysgd; print(*{*sys.modules} - before)"
    loaded = run_fresh(source)
    loaded.check_returncode()
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert packages - sys.stdlib_module_names == {"raysgd"}


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
TAKES_EACH_NAME = """
import sys
for name in {names}:
    for module in [module for module in sys.modules if module.partition(".")[0] == "raysgd"]:
        del sys.modules[module]
    import raysgd
    eval(name)
    assert "operators" in dir(raysgd), name
"""


def test_modules_can_be_written_behind_the_name_of_the_package() -> None:
    """Right behind `import raysgd`, each as if it were the first."""
    taken = run_fresh(TAKES_EACH_NAME.format(names=NAMES))
    assert taken.returncode == 0, taken.stderr


def test_the_packages_behind_its_name_load_no_framework() -> None:
    names = ("air", "data", "operators", "tf.TFTrainer", "torch", "train", "tune", "v2")
    taken = ", ".join(f"raysgd.{name}" for name in names)
    loaded = run_fresh(f"import sys, raysgd; {taken}; print(*{{name.partition('.')[0] for name in sys.modules}})")
    loaded.check_returncode()
    assert {"torch", "tensorflow", "keras", "ray"} & set(loaded.stdout.split()) == set()


PLAIN_PROGRAM = """
import sys
import raysgd, raysgd.torch, raysgd.util
import torch
from raysgd import TorchTrainer, TrainingOperator


class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=[(torch.ones(4, 2), torch.ones(4, 1))] * 2)


with TorchTrainer(training_operator_cls=Line, use_local=True) as trainer:
    trainer.fit(1)
print(*(name for name in sys.modules if name.startswith("raysgd.")))
"""
OF_OLD_PROGRAMS = {
    "raysgd.compat.aliases",
    "raysgd.compat.paths",
    "raysgd.data",
    "raysgd.tf",
    "raysgd.torch.creator_operator",
    "raysgd.torch.examples",
    "raysgd.torch.func_trainable",
    "raysgd.torch.operators_for_tests",
    "raysgd.torch.resnet",
    "raysgd.torch.torch_dataset",
    "raysgd.train",
    "raysgd.tune",
    "raysgd.util.data",
    "raysgd.util.iter",
    "raysgd.v2",
}


def test_a_plain_program_loads_nothing_that_only_programs_of_the_old_library_import() -> None:
    result = run_fresh(PLAIN_PROGRAM)
    loaded = set(result.stdout.split())
    assert "raysgd.torch.torch_trainer" in loaded, result.stderr
    assert loaded & OF_OLD_PROGRAMS == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module `raysgd` has no attribute `TorchTrianer`"):
        _ = raysgd.TorchTrianer


def test_the_former_name_of_the_trainer_refuses_and_names_the_new_one() -> None:
    with pytest.raises(DeprecationWarning, match=r"use `raysgd\.TorchTrainer`"):
        raysgd.PyTorchTrainer(model_creator=None)


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", raysgd.__version__)
