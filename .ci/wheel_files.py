"""Compares the files of a wheel with those of the commit that is checked out, so that a release contains nothing else.

Run as `python .ci/wheel_files.py dist/*.whl`. Beside these files, a wheel has only its metadata.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> dict[str, bytes]:
    """Return the content of the files of the package in the commit, by their names in a wheel."""
    command = ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD", "raysgd", "operators"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    files = {}
    for name in filter(None, names):
        if name != "raysgd/operators":  # a link to the folder `operators`
            shown = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, check=True, capture_output=True)
            files[name if name.startswith("raysgd/") else f"raysgd/{name}"] = shown.stdout
    return files


def differences(wheel: zipfile.ZipFile, files: Mapping[str, bytes]) -> list[str]:
    """Return a line for each file that is missing in a wheel, that is too many, or that has another content."""
    packed = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    packed = {name: content for name, content in packed.items() if ".dist-info/" not in name}
    return [
        f"{name}: {'missing' if name not in packed else 'not in the commit' if name not in files else 'differs'}"
        for name in sorted({*packed, *files})
        if packed.get(name) != files.get(name)
    ]


def main() -> int:
    """Print the differences of the wheels that the command names, and return its exit status."""
    found = [line for path in sys.argv[1:] for line in differences(zipfile.ZipFile(path), tracked())]
    print("\n".join(found) if found else "The wheel contains the files of the commit.")
    return 1 if found or len(sys.argv) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
