"""Programs in the style of each generation of the old library run migrated, and those for `ray.util.sgd` unchanged."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.compat.migrate.source import migrate
from tests.helpers.run_if import RunIf

pytestmark = pytest.mark.integration

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
REPEATED = {
    "operator_class",
    "own_epoch",
    "keras_model",
    "lightning_module",
    "tuned",
    "air_hugging_face",
    "air_lightning",
    "air_ray_data",
    "air_tuner",
}
"""Left to `make soak`: of their generation another one runs, or the same one unchanged."""
BY_HAND = {
    "lightning_on_ray": {
        "from ray_lightning import RayPlugin": "from raysgd import TorchTrainer, TrainingOperator",
        "trainer = pl.Trainer(max_epochs=3, plugins=[RayPlugin(num_workers=2)])": (
            "trainer = TorchTrainer("
            "training_operator_cls=TrainingOperator.from_ptl(Line), num_workers=2, config=config)"
        ),
        "trainer.fit(Line(config))": "with trainer: [print('loss', trainer.train()['loss']) for _ in range(3)]",
    },
    "horovod_on_ray": {
        "from horovod.ray import RayExecutor": "from raysgd.train import Trainer",
        "executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2, use_gpu=False)": (
            'executor = Trainer("horovod", num_workers=2, use_gpu=False)'
        ),
        'found = executor.run(train, kwargs={"num_epochs": 3})': "found = executor.run(lambda: train(num_epochs=3))",
    },
}
"""Lines that `migrate` leaves to a person, as a person writes them."""


def means_old_train(path: Path) -> bool:
    return "# ray_train" in path.read_text()


def cases() -> list[object]:
    marks = {name: [pytest.mark.soak] if name in REPEATED else [] for name in (path.stem for path in PROGRAMS)}
    marks["horovod_on_ray"] = [RunIf(modules=["horovod"])]
    marks["lightning_on_ray"] = [RunIf(modules=["lightning"])]
    marks["lightning_module"].append(RunIf(modules=["lightning"]))
    return [pytest.param(path, id=path.stem, marks=marks[path.stem]) for path in PROGRAMS]


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]


def assert_learned(found: list[float]) -> None:
    assert len(found) >= 2
    assert found[-1] < max(found[0], 0.01), "weights that happen to begin beside the answer have nothing to learn"


@pytest.mark.parametrize("name", ["operator_class", pytest.param("keras_model", marks=pytest.mark.soak)])
def test_a_program_for_ray_util_sgd_runs_unchanged(name: str, tmp_path: Path) -> None:
    script = shutil.copy(Path(__file__).parent / "programs" / f"{name}.py", tmp_path)
    environment = {**os.environ, "RAY_TMPDIR": os.environ.get("TMPDIR", "/tmp"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "raysgd.compat", str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_learned(losses(done.stdout))


def test_a_program_for_the_old_ray_train_is_told_to_migrate(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("from ray.train import Trainer\n")
    done = subprocess.run([sys.executable, "-m", "raysgd.compat", str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("rewrite it: `raysgd migrate --ray-train --write`\n"), done.stderr


MISSING = {
    "from ray.util.sgd.torch import distributed_torch_runner": "it was an internal of the old library",
    "import ray.util.sgd.torch.torch_runner": "it was an internal of the old library",
    "from ray.util.sgd.torch.constants import NUM_STEP": "of `ray.util.sgd.torch.constants` raysgd has `NUM_STEPS`",
    "import ray.util.sgd as sgd; sgd.Nothing": "of `ray.util.sgd` raysgd has `TorchTrainer`, `TFTrainer`",
    "from ray.util.sgd.pytorch.pytorch_trainer import PyTorchTrainable": "`TorchTrainer.as_trainable(...)` makes the",
    "from ray.util.sgd.pytorch import PyTorchTrainer": "nothing is missing",
    "from ray.util.sgd.pytorch.pytorch_trainer import PyTorchTrainer": "nothing is missing",
    "import ray.experimental.sgd.pytorch as old; old.PyTorchTrainer": "nothing is missing",
    "from ray.experimental.sgd.tf.tf_trainer import TFTrainer": "nothing is missing",
    "from ray.util.sgd.torch.examples.dcgan import model_creator, optimizer_creator": "nothing is missing",
    "from ray.tune.suggest import BasicVariantGenerator": "nothing is missing",
    "from ray.util.iter import from_actors": "use `raysgd.util.iter.from_iterators`",
    "from ray.util.iter import from_items": "nothing is missing",
}
"""Lines of old programs, and what took the place of what they look for."""


def test_a_name_that_is_missing_says_what_took_its_place(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(
        f"for line in {list(MISSING)}:\n"
        "    try:\n"
        "        exec(line)\n"
        "        print('nothing is missing')\n"
        "    except (ImportError, AttributeError) as error:\n"
        "        print(error)\n"
    )
    command = [sys.executable, "-m", "raysgd.compat", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for told, words in zip(done.stdout.splitlines(), MISSING.values(), strict=True):
        assert words in told


@pytest.mark.parametrize("path", cases())
def test_a_program_runs_migrated(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ray_cluster: None,
) -> None:
    found = migrate(path.read_bytes(), means_old_train(path))
    by_hand = BY_HAND.get(path.stem, {})
    assert found.has_failed == bool(by_hand), found.findings
    assert len(by_hand) <= 3
    text = found.text.decode()
    for left, written in by_hand.items():
        assert text.count(left) == 1
        text = text.replace(left, written)
    (tmp_path / path.name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning leaves it once it is imported
    capsys.readouterr()
    runpy.run_path(str(tmp_path / path.name), run_name="__main__")
    assert_learned(losses(capsys.readouterr().out))
