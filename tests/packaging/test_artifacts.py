"""What is published works: wheel and source distribution are built, installed each by itself, and run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
TESTS_OF_THE_SOURCES = (
    "tests/test_packaging.py",
    "tests/repository/test_layers.py",
    "tests/docs/test_site.py",
    "tests/test_exceptions.py",
)


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """What a command prints; without the path that leads to these sources."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkout, a source distribution of what is tracked in it, and a wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    sources = folder / "sources"
    tracked = run("git", "ls-files", "-z", folder=ROOT).split("\0")
    for name in filter(None, tracked):
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    build = "import setuptools.build_meta as build; build.build_sdist({!r})"
    run(sys.executable, "-c", build.format(str(folder)), folder=sources)
    [archive] = folder.glob("raysgd-*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, archive, folder=folder)
    return folder


@pytest.fixture(scope="module", params=["raysgd-*.whl", "raysgd-*.tar.gz"], ids=["wheel", "sdist"])
def python(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with one artifact; what that needs is lent from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=built)
    [artifact] = built.glob(request.param)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
    run(sys.executable, "-m", "pip", "install", *options, "--prefix", folder, artifact, folder=built)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n"
    )  # leads to packages, not to what `.pth` files do
    return folder / "bin" / "python"


def test_the_package_is_that_of_the_artifact(python: Path, tmp_path: Path) -> None:
    code = "import raysgd, raysgd.operators; print(raysgd.__file__); print(raysgd.operators.__file__)"
    places = run(python, "-c", code, folder=tmp_path).split()
    assert all(Path(place).is_relative_to(python.parents[1]) for place in places)


@pytest.mark.parametrize("folder", ["elsewhere", "checkout"])
def test_the_program_of_the_first_page_runs(python: Path, built: Path, tmp_path: Path, folder: str) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    where = "import raysgd; print(raysgd.__file__)\n"
    (tmp_path / "program.py").write_text(program + where)
    current = built / "sources" if folder == "checkout" else tmp_path
    output = run(python, tmp_path / "program.py", folder=current, RAY_TMPDIR=os.environ["TMPDIR"])
    *epochs, place = output.splitlines()
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", "\n".join(epochs))]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert Path(place).is_relative_to(python.parents[1])


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    assert "doctor" in run(python, python.parent / "raysgd", "--help", folder=tmp_path)


def test_the_source_distribution_has_what_its_tests_need(built: Path, tmp_path: Path) -> None:
    [archive] = built.glob("raysgd-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    [folder] = tmp_path.glob("raysgd-*")
    files = (path.relative_to(built / "sources") for path in (built / "sources").rglob("*") if path.is_file())
    tracked = {str(path) for path in files if not path.parts[0].startswith((".git", "raysgd.egg-info"))}
    assert sorted(name for name in tracked if not (folder / name).exists()) == []
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not integration and not soak")
    run(*command, *TESTS_OF_THE_SOURCES, folder=folder)
