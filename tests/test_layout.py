"""The tests mirror the tree: you find those of a large module by its name, or by what their docstring says.

A module without a test file of its name is named in the docstring of a test file that covers it, in a paragraph that
begins with "Covers" and gives the reason.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
NUM_LINES_OF_LARGE = 150

OF_BOTH_FRAMEWORKS = {
    "CreatorOperator",
    "OperatorContext",
    "RegisteredData",
    "RegisteredObjects",
    "TrainingOperator",
    "_Column",
}
OF_OTHER_LIBRARIES = {"Callback", "GANOperator", "RayTrainReportCallback", "TorchTrainer", "Trainer", "WorkerGroup"}
"""Names of Ray, in modules that have its names; and an operator beside the example that it was made of."""


def modules() -> Iterator[Path]:
    yield from sorted([*(ROOT / "raysgd").rglob("*.py"), *(ROOT / "operators").rglob("*.py")])


def num_lines(module: Path) -> int:
    return len(module.read_text(encoding="utf-8").splitlines())


def dotted(module: Path) -> str:
    """What it is imported as."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "raysgd" else ("raysgd", *parts))


def has_test_file(module: Path) -> bool:
    *folders, name = dotted(module).split(".")[1:] or ["raysgd"]
    stem = TESTS.joinpath(*folders, f"test_{name.lstrip('_')}")
    return any(Path(f"{stem}{ending}").exists() for ending in (".py", "_integration.py"))


def covered_elsewhere() -> set[str]:
    """The modules that docstrings of test files name."""
    named: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for paragraph in docstring.split("\n\n"):
            if paragraph.startswith("Covers "):
                named.update(re.findall(r"`(raysgd\.[\w.]+)`", paragraph))
    return named


def test_every_large_module_has_tests_that_are_found_by_its_name() -> None:
    large = [module for module in modules() if num_lines(module) > NUM_LINES_OF_LARGE]
    without = {dotted(module) for module in large if not has_test_file(module)}
    assert sorted(without - covered_elsewhere()) == []


def test_docstrings_name_modules_that_there_are() -> None:
    assert sorted(covered_elsewhere() - {dotted(module) for module in modules()}) == []


def test_the_name_of_a_class_stands_for_one_thing() -> None:
    nodes = [node for module in modules() for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))]
    counted = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, number in counted.items() if number > 1} == OF_BOTH_FRAMEWORKS | OF_OTHER_LIBRARIES
