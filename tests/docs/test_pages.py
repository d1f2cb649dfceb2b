"""The programs of the pages run, and the first page prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.docs.page_runner import PageRunner, page_runner
from tests.docs.test_docs import PAGES, ROOT, blocks, name_of, program, python_blocks

FIRST_PAGE = "README.md"
STARTS_RAY = re.compile(r"num_workers=[2-9]|spare_workers=[1-9]|ray\.data\.|Tuner\(|ScalingConfig\(|ensure_ray\(")


def pages_to_run(*, with_workers: bool) -> list[str]:
    """The pages behind the first that have Python to run: those that start workers, or the others."""
    programs = {name_of(page): program(python_blocks(page, "python")) for page in PAGES}
    del programs[FIRST_PAGE]
    return [name for name, text in programs.items() if text.strip() and bool(STARTS_RAY.search(text)) == with_workers]


def script_of(name: str, folder: Path) -> Path:
    """The program of a page, in a folder of its own."""
    script = folder / "page" / f"page_{Path(name).stem}.py"
    script.parent.mkdir()
    script.write_text(program(python_blocks(ROOT / name, "python")), encoding="utf-8")
    return script


def environment_of_pages(**variables: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | variables


def skip_without_horovod(name: str) -> None:
    if "import horovod" in program(python_blocks(ROOT / name, "python")):
        pytest.importorskip("horovod", reason="Horovod does not build with every Python")


@pytest.fixture(scope="module")
def runner(ray_cluster: None) -> Iterator[PageRunner]:
    """Comes after the cluster: a process that imported Ray before would not be let in, though it is told the token."""
    with page_runner() as runner:
        yield runner


@pytest.mark.promise("README's program")
@pytest.mark.integration
def test_the_first_page_prints_what_it_shows(tmp_path: Path) -> None:
    """In a process and with a Ray cluster of its own, as it does for whoever reads it."""
    script = script_of(FIRST_PAGE, tmp_path)
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=environment_of_pages(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert_prints_what_it_shows(result.stdout)


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_first_page_prints_the_same_with_another_number_of_workers(
    num_workers: int, runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    script, output = script_of(FIRST_PAGE, tmp_path), tmp_path / "output"
    text = script.read_text(encoding="utf-8")
    assert text.count("num_workers=2") == 1
    script.write_text(text.replace("num_workers=2", f"num_workers={num_workers}"), encoding="utf-8")
    assert runner.run(script, environment_on_cluster(), output) == 0, output.read_text()
    assert_prints_what_it_shows(output.read_text())


def assert_prints_what_it_shows(output: str) -> None:
    [shown] = [block for block in blocks(ROOT / FIRST_PAGE) if block.kind == "text"]
    printed = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert numbers(printed) == pytest.approx(numbers(shown.lines), abs=1.5e-3)


def numbers(lines: Iterable[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def environment_on_cluster() -> dict[str, str]:
    import ray

    return environment_of_pages(RAY_ADDRESS=ray.get_runtime_context().gcs_address)


@pytest.mark.integration
@pytest.mark.parametrize("name", pages_to_run(with_workers=True))
def test_the_python_of_a_page_runs_with_workers(
    name: str, runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert runner.run(script_of(name, tmp_path), environment_on_cluster(), output) == 0, output.read_text()


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "num_alone"),
    [
        ("docs/reference/old-names.md", 1),
        ("docs/lightning.md", 2),
        ("docs/huggingface.md", 3),
        ("docs/recipes/images.md", 2),
        ("docs/recipes/training-arguments.md", 1),
    ],
)
def test_the_programs_of_a_page_run_on_two_workers_too(
    name: str, num_alone: int, runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    script, output = script_of(name, tmp_path), tmp_path / "output"
    text = script.read_text(encoding="utf-8")
    assert text.count("use_local=True") == num_alone
    script.write_text(text.replace("use_local=True", "num_workers=2"), encoding="utf-8")
    assert runner.run(script, environment_on_cluster(), output) == 0, output.read_text()


@pytest.mark.program
@pytest.mark.parametrize("name", pages_to_run(with_workers=False))
def test_the_python_of_a_page_runs(name: str, runner: PageRunner, tmp_path: Path) -> None:
    skip_without_horovod(name)
    output = tmp_path / "output"
    assert runner.run(script_of(name, tmp_path), environment_of_pages(), output) == 0, output.read_text()
