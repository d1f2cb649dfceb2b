"""Programs in the style of each generation of the old library: they run unchanged, and they run migrated."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.compat.migrate.source import migrate

pytestmark = pytest.mark.integration

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
NAMES = [path.stem for path in PROGRAMS]
SHORT = {"unchanged": "operator_class", "migrated": "train_function"}
"""What `make test` runs of each way; the rest is for `make soak`."""


def cases(way: str) -> list[object]:
    marks = {name: [] if name == SHORT[way] else [pytest.mark.soak] for name in NAMES}
    return [pytest.param(path, id=path.stem, marks=marks[path.stem]) for path in PROGRAMS]


def means_old_train(path: Path) -> bool:
    return "# ray_train" in path.read_text()


def losses(command: list[str], folder: Path) -> list[float]:
    """What a program prints as losses, run with one CPU more than it needs, away from the sources."""
    environment = {**os.environ, "RAY_TMPDIR": os.environ.get("TMPDIR", "/tmp"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(found) for found in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]


def assert_learned(found: list[float]) -> None:
    assert len(found) >= 2
    assert found[-1] < found[0]


@pytest.mark.parametrize("path", cases("unchanged"))
def test_a_program_runs_unchanged(path: Path, tmp_path: Path) -> None:
    if path.stem == "creators":
        pytest.skip("it passes arguments that were retired before Ray 1.0; it runs migrated")
    script = shutil.copy(path, tmp_path)
    flag = ["--ray-train"] if means_old_train(path) else []
    assert_learned(losses(["-m", "raysgd.compat", *flag, str(script)], tmp_path))


def test_a_program_for_the_old_ray_train_is_told_of_the_option(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("from ray.train import Trainer\n")
    done = subprocess.run([sys.executable, "-m", "raysgd.compat", str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("pass `--ray-train`\n"), done.stderr


MISSING = {
    "from ray.util.sgd.torch import distributed_torch_runner": "it was an internal of the old library",
    "import ray.util.sgd.torch.torch_runner": "it was an internal of the old library",
    "from ray.util.sgd.torch.constants import NOTHING": "`raysgd.torch.constants` has no such name",
    "import ray.util.sgd as sgd; sgd.Nothing": "`raysgd` has no such name",
    "from ray.train import UserCallback": "pass a `raysgd.callbacks.Callback`",
    "from ray.train.session import get_accelerator": "belongs to the run",
    "from ray.train import Trainer": "nothing is missing",
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
    command = [sys.executable, "-m", "raysgd.compat", "--ray-train", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for told, words in zip(done.stdout.splitlines(), MISSING.values(), strict=True):
        assert words in told


@pytest.mark.parametrize("path", cases("migrated"))
def test_a_program_runs_migrated(path: Path, tmp_path: Path) -> None:
    found = migrate(path.read_bytes(), means_old_train(path))
    assert found.findings == []
    assert b"ray.util.sgd" not in found.text
    script = tmp_path / path.name
    script.write_bytes(found.text)
    assert_learned(losses([str(script)], tmp_path))


def test_there_are_eight_styles() -> None:
    assert len(PROGRAMS) >= 8
