"""Writes `constraints-dev.txt`: the versions that pip chooses for the development environment.

Run by `make lock`, which keeps the versions that are there; `make lock UPGRADE=1` chooses all again. A version that
does not support the oldest Python gets a marker, so that pip chooses another one there. The place that a version comes
from is left out, and so is its local part: a build of PyTorch for CPUs satisfies the line for PyTorch, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints-dev.txt"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
HEADER = """\
# The development environment, version by version: what the tests, the checks, the demo and the benchmarks run with.
# Written by `make lock`, from pyproject.toml. Use it as `pip install -c constraints-dev.txt ...`. A line with a marker
# names a release that does not support every Python; elsewhere pip picks the newest one that does.
"""


def resolved(*options: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += [*options, "--group", "dev", "--group", "full", "--group", "docs", f"{ROOT}[all,vision]"]
    report = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return [each["metadata"] for each in report["install"]]


def line_of(metadata: dict[str, Any]) -> str:
    """The line for one package."""
    supported = SpecifierSet(metadata.get("requires_python", ""))
    first = next(python for python in PYTHONS if Version(f"{python}.99") in supported)
    marker = "" if first == PYTHONS[0] else f' ; python_version >= "{first}"'
    return f"{metadata['name']}=={Version(metadata['version']).public}{marker}"


def main(upgrade: bool) -> None:
    """Writes the file."""
    options = () if upgrade else ("-c", str(LOCK))
    lines = [line_of(each) for each in resolved(*options) if each["name"] != "raysgd"]
    LOCK.write_text(HEADER + "\n".join(sorted(lines, key=str.lower)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main("--upgrade" in sys.argv[1:])
