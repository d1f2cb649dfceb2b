"""Settings that `pyproject.toml` cannot hold: the version, the README with absolute links, and where packages are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
DATA = ("raysgd.callbacks.page", "raysgd.callbacks.page.uplot")  # folders without code are packages to setuptools


def read_version() -> str:
    """Read the version without importing the package, whose dependencies may not be installed yet."""
    source = (ROOT / "raysgd" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('`raysgd/_version.py` must contain a line like `__version__ = "0.1.0"`.')
    return found.group(1)


def read_description() -> str:
    """Return the README with absolute links: it is the project page. Empty where only the sources were copied."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository()}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{repository()}/blob/main/", text)


def repository() -> str:
    """Return the address of the repository."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'^Source = "([^"]+)"$', settings, flags=re.MULTILINE)[0]


def package_dir() -> dict[str, str]:
    """Return where packages are. `raysgd/operators` is a link to `operators`, which archives and Windows may lack.

    An editable install uses the link if it is there: then it is a plain path, which type checkers follow, and no import
    hook.
    """
    is_plain = "editable_wheel" in sys.argv and (ROOT / "raysgd" / "operators").is_dir()
    return {"": "."} if is_plain else {"": ".", "raysgd.operators": "operators"}


setup(
    version=read_version(),
    long_description=read_description(),
    long_description_content_type="text/markdown",
    packages=sorted({*find_packages(include=["raysgd", "raysgd.*"]), "raysgd.operators", *DATA}),
    package_dir=package_dir(),
    package_data={
        "": ["*.css", "*.ini", "*.pyi", "mends.txt"],
        "raysgd": ["py.typed"],
        **{each: ["*"] for each in DATA},
    },
    zip_safe=False,
)
