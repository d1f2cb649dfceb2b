"""`python -m raysgd.horovod.install` builds Horovod for this environment's PyTorch and installs it.

The built wheel is cached. A later installation for the same Python, PyTorch and build options does not build it again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from raysgd.core.cache import cache_folder, check_private, make_private
from raysgd.core.imports import install_command
from raysgd.horovod import recipe

_NEEDED = {"cloudpickle": "cloudpickle", "packaging": "packaging", "psutil": "psutil", "yaml": "pyyaml"}
_TAIL_LINES = 25
# A Python program that starts Horovod with one process, to check that it works with this PyTorch.
_PROBE = "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1 and hvd.gloo_built(); hvd.shutdown()"


class InstallError(Exception):
    """Horovod cannot be installed: a required package or tool is missing, or a step of the installation failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m raysgd.horovod.install`, and return its exit status.

    Args:
        arguments: The command-line arguments. Default: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m raysgd.horovod.install",
        description=f"Builds Horovod {recipe.VERSION} for the PyTorch of this environment and installs it. "
        "Variables such as HOROVOD_GPU_OPERATIONS reach the build.",
    )
    parser.add_argument("--force", action="store_true", help="build and install even if that was done before")
    options = parser.parse_args(arguments)
    try:
        install(force=options.force)
    except InstallError as error:
        print(f"Horovod was not installed. {error}", file=sys.stderr)
        return 1
    return 0


def install(*, force: bool = False) -> None:
    """Install Horovod into this environment, unless the right version is installed already and starts.

    If the cache has no wheel for this environment, Horovod is built first.

    Args:
        force: True to build and install Horovod in any case.

    Raises:
        InstallError: A requirement is missing, or a step of the installation failed.
    """
    target = find_target()
    version = f"{recipe.VERSION}+{recipe.local_version(target, os.environ)}"
    folder = Path(cache_folder(os.environ, str(Path.home()))) / "horovod" / recipe.cache_key(target, os.environ)
    say(f"Horovod {recipe.VERSION} for PyTorch {target.torch}, {target.python}, {target.platform}")
    if not force and installed_version() == version and probe() is None:
        say(f"is installed already, in {sys.prefix}")
        return
    wheels = [] if force else sorted(folder.glob("*.whl"))
    wheel = wheels[0] if wheels else build(target, folder)
    try:
        check_private(wheel)
    except PermissionError as error:
        raise InstallError(f"The wheel is not installed: {error}") from error
    say(f"installing {wheel} into {sys.prefix}")
    _pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel), task="installing the wheel")
    problem = probe()
    if problem is not None:
        raise InstallError(f"It is installed in {sys.prefix}, but does not start:\n{problem}\nTry again with --force.")
    say("it starts")


def find_target() -> recipe.Target:
    """Return the environment to build Horovod for: its Python version, platform and PyTorch version.

    Raises:
        InstallError: PyTorch or a package that the build needs is not installed.
    """
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if importlib.util.find_spec("torch") is None:
        missing.insert(0, "torch")
    if missing:
        raise InstallError(f"It needs {', '.join(missing)} in {sys.prefix}. Run: {install_command('horovod')}")
    import torch

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return recipe.Target(python, sysconfig.get_platform(), torch.__version__, torch.version.cuda is not None)


def installed_version() -> str | None:
    """Return the version of the installed Horovod, or None if Horovod is not installed."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def probe() -> str | None:
    """Test in a separate process whether Horovod starts. Return the end of the output if it fails, else None."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    if os.path.exists("/sys/class/net/lo"):
        environment["HOROVOD_GLOO_IFACE"] = "lo"
    result = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment)
    return None if result.returncode == 0 else _tail(result.stdout + result.stderr)


def build(target: recipe.Target, folder: Path) -> Path:
    """Download Horovod's source, patch it, build a wheel, and copy the wheel to the cache.

    Args:
        target: The environment to build for.
        folder: The wheel's folder in the cache.

    Returns:
        The path of the wheel in the cache.

    Raises:
        InstallError: A build tool is missing, or the download, a patch or the build failed.
    """
    cmake = _find_tools()
    with tempfile.TemporaryDirectory(prefix="raysgd-horovod-") as scratch:
        source = fetch(Path(scratch))
        for mend in recipe.MENDS:
            say(f"mending {mend.path}: {mend.reason}")
        mend_all(source)
        say("building it, which takes some minutes")
        environment = recipe.build_environment(
            target, os.environ, cmake, str(Path(sys.executable).parent), os.cpu_count() or 1
        )
        _pip(
            *("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "-w", scratch, str(source)),
            task="building it",
            environment=environment,
        )
        [built] = Path(scratch).glob("*.whl")
        return keep(built, folder)


def fetch(scratch: Path) -> Path:
    """Download Horovod's source package with pip into `scratch`, unpack it there, and return the source folder."""
    say(f"fetching the source package of Horovod {recipe.VERSION}")
    requirements = scratch / "requirements.txt"
    requirements.write_text(recipe.REQUIREMENT + "\n", encoding="utf-8")
    _pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"),
        *("-r", str(requirements), "-d", str(scratch)),
        task="fetching the source package",
    )
    [archive] = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(scratch, filter="data")
    return scratch / f"horovod-{recipe.VERSION}"


def mend_all(source: Path) -> None:
    """Apply all patches to Horovod's source files in the folder `source`.

    Raises:
        InstallError: A file is missing, or does not contain exactly once the text that a patch replaces.
    """
    for mend in recipe.MENDS:
        path = source / mend.path
        try:
            path.write_text(mend.applied_to(path.read_text(encoding="utf-8")), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InstallError(f"The source cannot be patched: {error}.") from error


def keep(wheel: Path, folder: Path) -> Path:
    """Copy the wheel to its folder in the cache, and return the path there.

    The complete wheel appears in one step. Other processes, which may build the same wheel, never see half a file.
    """
    try:
        make_private(folder)
    except PermissionError as error:
        raise InstallError(f"The wheel cannot be kept: {error}") from error
    copy = folder / f"{wheel.name}.{os.getpid()}"
    shutil.copyfile(wheel, copy)
    copy.chmod(0o600)
    os.replace(copy, folder / wheel.name)
    say(f"keeping it as {folder / wheel.name}")
    return folder / wheel.name


def say(text: str) -> None:
    """Print a message about the progress of the installation."""
    print(f"horovod: {text}", flush=True)


def _find_tools() -> str:
    """Check that this machine has all build tools, and return the path of the CMake to use.

    Raises:
        InstallError: A build tool is missing.
    """
    candidates = [os.environ.get("HOROVOD_CMAKE"), str(Path(sys.executable).parent / "cmake"), shutil.which("cmake")]
    versions = {path: _answer(path) for path in candidates if path and shutil.which(path)}
    missing = recipe.missing_tools(lambda name: shutil.which(name) is not None, versions)
    if missing:
        raise InstallError("To build it, this machine lacks:\n" + "\n".join(f"- {line}" for line in missing))
    cmake = recipe.usable_cmake(versions)
    assert cmake is not None
    return cmake


def _answer(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout


def _pip(*arguments: str, task: str, environment: dict[str, str] | None = None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"There is no pip in {sys.prefix}. Run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if result.returncode != 0:
        with tempfile.NamedTemporaryFile("w", prefix="raysgd-horovod-", suffix=".log", delete=False) as log:
            log.write(result.stdout)
        raise InstallError(f"{task.capitalize()} failed; the whole log is {log.name}. Its end:\n{_tail(result.stdout)}")


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main())
