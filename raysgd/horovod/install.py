"""`python -m raysgd.horovod.install` builds Horovod for this environment's PyTorch and installs it.

The built wheel is cached. A later installation for the same Python, PyTorch and build options does not build it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysgd.core.files import cache_folder, check_private, make_private
from raysgd.core.imports import install_command

VERSION = "0.28.1"
# Hash of the source package that the patches below are written for. pip refuses a download with another hash.
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
REQUIREMENT = f"horovod=={VERSION} --hash=sha256:{_SHA256}"
MIN_CMAKE, TOO_NEW_CMAKE = (3, 13), (4, 0)


@dataclass(frozen=True)
class Mend:
    """One patch to Horovod's source code.

    Attributes:
        path: Path of the file to patch, relative to the source folder.
        old: The text to replace. It must occur exactly once.
        new: The text that replaces `old`.
        reason: Why the patch is needed.
    """

    path: str
    old: str
    new: str
    reason: str

    def applied_to(self, text: str) -> str:
        """Return the contents of the file, `text`, with the patch applied.

        Raises:
            ValueError: `text` does not contain `old` exactly once, so the patch was written for another source.
        """
        num_places = text.count(self.old)
        if num_places != 1:
            line = self.old.strip().partition("\n")[0]
            raise ValueError(f"`{self.path}` has {num_places} places that begin with {line!r} instead of 1")
        return text.replace(self.old, self.new)


def read_mends() -> Iterator[Mend]:
    """Yield the patches in `mends.txt`.

    A patch is a paragraph: the path and the reason, then the lines to replace after `-`, and the new lines after `+`.
    """
    for paragraph in Path(__file__).with_name("mends.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        head, *lines = paragraph.split("\n")
        path, _, reason = head.partition(": ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mend(path, old, new, reason)


MENDS = tuple(read_mends())

_DEFAULTS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
# Matches the environment variables that control how Horovod is built. Other variables that start with HOROVOD_ only
# affect processes that run Horovod. A cached wheel can be used whatever their values are.
_OPTIONS = re.compile(r"HOROVOD_(WITH|WITHOUT|GPU|CUDA|NCCL|ROCM|BUILD|CPU|ALLOW|DEBUG)(_|$)")


@dataclass(frozen=True)
class Target:
    """The environment that Horovod is built for.

    Attributes:
        python: Tag of the Python version, such as "cp311".
        platform: Operating system and processor, such as "linux-x86_64".
        torch: PyTorch version, including the part after "+", such as "2.5.1+cu124".
        has_cuda: True if this PyTorch was built with CUDA.
    """

    python: str
    platform: str
    torch: str
    has_cuda: bool


def options(target: Target, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that select which parts of Horovod are built.

    By default, only the support for PyTorch and Gloo is built. Build options in `environment` override this.

    Args:
        target: The environment to build for.
        environment: The current environment variables.
    """
    given = {name: value for name, value in environment.items() if _OPTIONS.match(name)}
    defaults = dict(_DEFAULTS) if target.has_cuda else {**_DEFAULTS, "HOROVOD_WITHOUT_CUDA": "1"}
    wanted = {name: value for name, value in defaults.items() if _opposite(name) not in given}
    return dict(sorted({**wanted, **given}.items()))


def _opposite(name: str) -> str:
    with_out, without = "HOROVOD_WITH_", "HOROVOD_WITHOUT_"
    return name.replace(without, with_out) if name.startswith(without) else name.replace(with_out, without)


def build_environment(
    target: Target, environment: Mapping[str, str], cmake: str, folder_of_python: str, num_jobs: int
) -> dict[str, str]:
    """Return the environment variables for the process that builds Horovod.

    Args:
        target: The environment to build for.
        environment: The current environment variables.
        cmake: Path of the CMake to use.
        folder_of_python: Folder of the Python executable. It is put first on the PATH, so that build scripts use it.
        num_jobs: Number of parallel compiler processes. Ignored if the environment variable MAKEFLAGS is set.
    """
    return {
        **environment,
        "MAKEFLAGS": environment.get("MAKEFLAGS") or f"-j{num_jobs}",
        "PATH": f"{folder_of_python}:{environment.get('PATH', '')}",
        **options(target, environment),
        "HOROVOD_CMAKE": cmake,
        "HOROVOD_LOCAL_VERSION": local_version(target, environment),
    }


def local_version(target: Target, environment: Mapping[str, str]) -> str:
    """Return the part of the wheel's version after "+": a hash of everything that affects the build."""
    text = repr((VERSION, MENDS, target, options(target, environment)))
    return f"raysgd.{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def cache_key(target: Target, environment: Mapping[str, str]) -> str:
    """Return the name of the folder in the cache that holds the wheel for this target and these build options."""
    return f"{VERSION}-{target.python}-{target.platform}-torch-{target.torch}-{local_version(target, environment)}"


def missing_tools(has_command: Callable[[str], bool], cmake_versions: Mapping[str, str]) -> list[str]:
    """Return a message for each tool that the build needs and this machine lacks. It says how to install the tool.

    Args:
        has_command: Function that returns True if this machine has a command with the given name.
        cmake_versions: For the path of each CMake on this machine, what it prints with `--version`.
    """
    missing = []
    if not any(has_command(name) for name in ("c++", "g++", "clang++")):
        missing.append("a C++ compiler with C++20, such as g++ 11: install the system's package")
    if not has_command("make"):
        missing.append("`make`: install the system's package")
    if usable_cmake(cmake_versions) is None:
        found = [f"{path} is {answer.partition(chr(10))[0] or 'broken'}" for path, answer in cmake_versions.items()]
        found_text = ", ".join(found) or "none found"
        missing.append(f'CMake from 3.13 on, before 4 ({found_text}): pip install "cmake>=3.13,<4"')
    return missing


def usable_cmake(cmake_versions: Mapping[str, str]) -> str | None:
    """Return the path of the first CMake that can build Horovod (3.13 or later, before 4), or None.

    Args:
        cmake_versions: For the path of each CMake on this machine, what it prints with `--version`.
    """
    for path, text in cmake_versions.items():
        found = re.search(r"version (\d+)\.(\d+)", text)
        if found and MIN_CMAKE <= (int(found[1]), int(found[2])) < TOO_NEW_CMAKE:
            return path
    return None


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
        description=f"Builds Horovod {VERSION} for the PyTorch of this environment and installs it. "
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
    version = f"{VERSION}+{local_version(target, os.environ)}"
    folder = Path(cache_folder(os.environ, str(Path.home()))) / "horovod" / cache_key(target, os.environ)
    say(f"Horovod {VERSION} for PyTorch {target.torch}, {target.python}, {target.platform}")
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


def find_target() -> Target:
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
    return Target(python, sysconfig.get_platform(), torch.__version__, torch.version.cuda is not None)


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


def build(target: Target, folder: Path) -> Path:
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
        for mend in MENDS:
            say(f"mending {mend.path}: {mend.reason}")
        mend_all(source)
        say("building it, which takes some minutes")
        environment = build_environment(
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
    say(f"fetching the source package of Horovod {VERSION}")
    requirements = scratch / "requirements.txt"
    requirements.write_text(REQUIREMENT + "\n", encoding="utf-8")
    _pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"),
        *("-r", str(requirements), "-d", str(scratch)),
        task="fetching the source package",
    )
    [archive] = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(scratch, filter="data")
    return scratch / f"horovod-{VERSION}"


def mend_all(source: Path) -> None:
    """Apply all patches to Horovod's source files in the folder `source`.

    Raises:
        InstallError: A file is missing, or does not contain exactly once the text that a patch replaces.
    """
    for mend in MENDS:
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
    missing = missing_tools(lambda name: shutil.which(name) is not None, versions)
    if missing:
        raise InstallError("To build it, this machine lacks:\n" + "\n".join(f"- {line}" for line in missing))
    cmake = usable_cmake(versions)
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
