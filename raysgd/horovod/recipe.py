"""Defines how Horovod is built: the source package, patches, build options, and the wheel's folder in the cache.

The functions only compute values. `install.py` reads and writes the files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
