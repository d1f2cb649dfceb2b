"""Every example runs on two workers where a user pastes it: as a file in an empty folder."""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.page_runner import PageRunner, page_runner
from tests.helpers.vision import put_torchvision

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "survive.py")  # that is in `test_proofs.py`
OLD_SPELLINGS = ("use_fp16", "wrap_ddp", "BATCH_SIZE", "*batch_size", "_creator", "use_tqdm", "_common")


def last(column: str, text: str) -> float:
    """The value in the last row of the history that a program has printed."""
    lines = [line.split() for line in text.splitlines()]
    [head] = [index for index, words in enumerate(lines) if column in words]
    rows = [words for words in lines[head + 1 :] if words and words[0].isdigit()]
    return float(rows[-1][lines[head].index(column)])


def printed(pattern: str, text: str) -> float:
    [found] = re.findall(pattern, text)
    return float(found)


def read_correctly(folder: Path) -> int:
    """How many digits of the folder are in the table as they were written."""
    from sklearn.datasets import load_digits

    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = zip(rows, load_digits().target[:360], strict=True)
    return sum(int(row["digit"]) == digit for row, digit in pairs)


DONE: dict[str, Callable[[Path, str], bool]] = {
    "bad_batches.py": lambda folder, text: printed(r"accuracy ([\d.]+)", text) > 0.8 and "not finite on rank" in text,
    "gan.py": lambda folder, text: (folder / "digits.png").stat().st_size > 1000 and last("loss_g", text) > 0,
    "image_folder.py": lambda folder, text: (
        printed(r"accuracy ([\d.]+);", text) > 0.6 and (folder / "photos.pt").exists()
    ),
    "keras_callbacks.py": lambda folder, text: (
        printed(r"accuracy ([\d.]+);", text) > 0.9 and (folder / "digits.keras").exists()
    ),
    "lora.py": lambda folder, text: (
        printed(r"loss [\d.]+ to ([\d.]+);", text) < 6.2 and (folder / "lora" / "merged" / "model.safetensors").exists()
    ),
    "parquet_stream.py": lambda folder, text: printed(r"off by ([\d.]+)", text) < 1.2,
    "predict_folder.py": lambda folder, text: read_correctly(folder) > 300,
    "spot.py": lambda folder, text: (folder / "digits.pt").exists() and "20 epochs, 0 failures" in text,
    "transformers_trainer.py": lambda folder, text: printed(r"accuracy ([\d.]+);", text) > 0.7,
    "text_classification.py": lambda folder, text: (
        last("val_accuracy", text) > 0.7 and (folder / "fine-tuned" / "model.safetensors").exists()
    ),
    "tuning.py": lambda folder, text: printed(r"accuracy ([\d.]+)", text) > 0.9,
}
"""Whether an example has done what it says. There are two classes of sentences, five of photos."""


@pytest.fixture(scope="module")
def runner(ray_cluster: None) -> Iterator[PageRunner]:
    with page_runner("sklearn.datasets") as runner:
        yield runner


@pytest.fixture
def environment(ray_cluster: None) -> dict[str, str]:
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def paste(name: str, folder: Path) -> Path:
    """Put an example into a file there."""
    script = folder / "program.py"
    script.write_text((EXAMPLES / name).read_text(encoding="utf-8"), encoding="utf-8")
    if name == "image_folder.py":
        put_torchvision(folder)
    return script


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_stands_alone(name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    assert len(source.splitlines()) < (90 if name in ("gan.py", "lora.py") else 60)
    assert "\n\nData: " in docstring
    assert "Packages: " in docstring
    assert re.search(r"\.fit\(", source)
    assert "num_workers=2" in source
    assert [word for word in OLD_SPELLINGS if word in source] == []


def test_it_is_known_of_every_example_what_it_leaves_and_the_table_lists_it() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(DONE) == NAMES
    assert [name for name in NAMES if f"[{name}]({name})" not in page] == []


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_where_it_is_pasted(
    name: str, runner: PageRunner, environment: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    status = runner.run(paste(name, folder), environment, output)
    text = output.read_text()
    assert status == 0, text
    assert DONE[name](folder, text), text


@pytest.mark.integration
def test_a_run_whose_program_is_killed_continues_when_it_is_started_again(
    environment: dict[str, str], folder: Path
) -> None:
    command = [sys.executable, str(paste("spot.py", folder))]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as first:
        for line in first.stderr or ():
            if line.startswith("epoch  5/20"):
                break
        first.kill()
    second = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    epochs = [int(found) for found in re.findall(r"^epoch +(\d+)/20", second.stderr, re.MULTILINE)]
    assert epochs == list(range(epochs[0], 21))
    assert epochs[0] >= 5  # the file of epoch 5 may not have been complete
    assert "20 epochs, 0 failures" in second.stdout


@pytest.mark.integration
def test_a_job_that_gets_sigterm_saves_its_step_and_continues_when_it_is_started_again(
    environment: dict[str, str], folder: Path
) -> None:
    """As at the time limit of Slurm, or before a spot machine is taken away."""
    command = [sys.executable, str(paste("lora.py", folder))]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as first:
        for line in first.stderr or ():
            if line.startswith("epoch 2/5"):  # of the adapter: the base has three epochs
                first.terminate()
                break
        left = first.stderr.read() if first.stderr else ""
    assert first.returncode == 143, left
    second = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert "/3 " not in second.stderr  # the base is not trained again
    epochs = [int(found) for found in re.findall(r"^epoch (\d)/5", second.stderr, re.MULTILINE)]
    assert epochs in ([3, 4, 5], [4, 5])
    assert DONE["lora.py"](folder, second.stdout), second.stdout


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_a_program_on_workers_of_its_own(name: str, folder: Path) -> None:
    """With a Ray cluster of its own, as for whoever tries it first."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, str(paste(name, folder))]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert DONE[name](folder, done.stdout), done.stdout
