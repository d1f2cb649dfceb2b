"""Takes one leaf of the library away at a time, and runs the tests of the rest.

python -m tests.leaves                 # all leaves of the list
python -m tests.leaves replay journal  # only these
python -m tests.leaves --together "chaos kit" doctor  # one run of the tests, without all of these
python -m tests.leaves --list

A leaf is a capability that the rest of the library can do without. Its files are deleted in a copy of the repository,
with the leaves that stand on it, the examples and test files that import it, and the names of it that packages list.
Then the tests of `make unit` run, without those that use what is gone. The leaf is one if all of them pass.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GONE = "RAYSGD_GONE"  # the words of what is gone, for the processes that run the tests
CHOICE = "not (integration or program or long or soak or gpu)"  # as `make unit` has it
LEFT_OUT = (
    "tests/repository",
    "tests/helpers",
    "tests/docs",
    "tests/examples/test_proofs.py",
    "tests/examples/test_examples.py::test_it_is_known_of_every_example_what_it_leaves_and_the_table_lists_it",
)
"""They compare the repository with lists and pages."""


@dataclass(frozen=True)
class Leaf:
    """What is deleted with a leaf.

    Attributes:
        paths: Its files and folders.
        carries: The leaves that stand on it, and go with it.
        words: How tests say that they use it, if not by a module or a name that it has.
    """

    paths: tuple[str, ...]
    carries: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


LEAVES = {
    "populations": Leaf(("raysgd/tune/population.py",)),
    "guard": Leaf(("raysgd/callbacks/guard.py",)),
    "HTML report": Leaf(("raysgd/callbacks/report.py", "raysgd/callbacks/page")),
    "replay": Leaf(("raysgd/replay",), words=("why", "replay", "bisect")),
    "journal": Leaf(("raysgd/journal",), carries=("replay",)),
    "services": Leaf(
        (
            "raysgd/callbacks/loggers.py",
            "raysgd/core/writers/services.py",
            "raysgd/air/callbacks",
            "raysgd/air/integrations",
        ),
        words=("mlflow", "MLflowLoggerCallback", "wandb", "comet"),
    ),
    "averages": Leaf(("raysgd/callbacks/averages.py",)),
    "helpers of functions": Leaf(
        ("raysgd/train/huggingface", "raysgd/train/lightning.py", "raysgd/train/collective.py")
    ),
    "batch predictor": Leaf(("raysgd/train/batch_predictor.py",)),
    "examples": Leaf(("raysgd/torch/examples", "raysgd/tf/examples", "raysgd/train/examples")),
    "chaos kit": Leaf(("raysgd/testing",)),
    "doctor": Leaf(("raysgd/cli/doctor.py",), words=("doctor",)),
    "codemod": Leaf(("raysgd/compat/migrate",), words=("migrate",)),
    "Lightning": Leaf(
        ("raysgd/torch/lightning.py", "raysgd/torch/lightning_operator.py"),
        words=("from_lightning", "lightning_inside_a_pass"),
    ),
    "Horovod": Leaf(
        (
            "raysgd/horovod",
            "raysgd/core/connections/horovod.py",
            "raysgd/torch/parallel/horovod_parallel.py",
            "raysgd/train/horovod.py",
        ),
        words=("horovod",),
    ),
    "deterministic": Leaf(("raysgd/torch/parallel/ordered.py",), words=("deterministic",)),
    "FSDP": Leaf(("raysgd/torch/parallel/fsdp.py",), words=("fsdp", "FSDP")),
    "Keras": Leaf(
        ("raysgd/tf", "raysgd/train/tensorflow.py", "raysgd/tune/tensorflow.py"), words=("tensorflow", "keras", "tf")
    ),
    "iterators": Leaf(("raysgd/util", "raysgd/data/dataset.py", "raysgd/data/examples")),
    "trials": Leaf(
        ("raysgd/tune", "raysgd/train/_tune.py", "raysgd/torch/torch_trainable.py", "raysgd/tf/tf_trainable.py")
    ),
    "detached": Leaf(
        ("raysgd/detached", "raysgd/trainer/driver/kept_trainer.py"), words=("detached", "Detached", "keeper")
    ),
    "RaySGD v2": Leaf(("raysgd/v2",)),
}


def files_in(folder: Path, *places: str) -> Iterator[Path]:
    for place in places:
        yield from sorted((folder / place).rglob("*.py"))


def module_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"raysgd.{name}" if parts[0] == "operators" else name


def modules_at(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def loads(path: Path, folder: Path) -> set[str]:
    """Return what a module imports when it is imported: `a.b` for `from a import b`."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = module_of(path, folder).split(".")[: -child.level or None] if child.level else []
                yield from (".".join([*package, *filter(None, [child.module]), alias.name]) for alias in child.names)
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_for_types(child):
                yield from walk(child)

    return set(walk(ast.parse(path.read_text(encoding="utf-8"))))


def is_in(target: str, modules: Collection[str]) -> bool:
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def stuck(folder: Path, rest: Iterable[Path], modules: Collection[str]) -> list[str]:
    """Return the imports of deleted modules that the rest makes when it is imported."""
    return [
        f"{module_of(path, folder)} imports {target}"
        for path in rest
        for target in sorted(loads(path, folder))
        if is_in(target, modules)
    ]


def without_names(folder: Path, modules: Collection[str]) -> set[str]:
    """Take the names of deleted modules out of the lists of the packages, and return them."""
    gone = set()
    for path in sorted((folder / "raysgd").rglob("__init__.pyi")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        names = {line: re.match(r"from (\S+) import (\w+) as ", line) for line in lines}
        lost = {line: name[2] for line, name in names.items() if name and is_in(name[1], modules)}
        path.write_text("".join(line for line in lines if line not in lost), encoding="utf-8")
        gone |= {*lost.values()}
    return gone


def take(folder: Path, chosen: Collection[str]) -> set[str]:
    """Delete leaves and what belongs to them, and return the words for what is gone.

    Raises:
        ValueError: The rest imports one of them when it is imported.
    """
    leaves = [LEAVES[name] for name in dict.fromkeys(each for name in chosen for each in (name, *LEAVES[name].carries))]
    modules = set()
    for path in (folder / place for each in leaves for place in each.paths):
        modules |= {module_of(each, folder) for each in modules_at(path)}
        path.unlink() if path.is_file() else shutil.rmtree(path)
    if found := stuck(folder, files_in(folder, "raysgd", "operators"), modules):
        raise ValueError("\n".join(found))
    names = without_names(folder, modules)
    gone = {*modules}
    while with_it := [
        path
        for path in files_in(folder, "tests", "examples")
        if any(is_in(each, gone) or each.rpartition(".")[2] in names for each in loads(path, folder))
    ]:
        for path in with_it:
            gone.add(module_of(path, folder))
            path.unlink()
    return {*gone, *names, *(word for each in leaves for word in each.words)}


def uses(path: str, words: Collection[str]) -> set[str]:
    """Return the functions and classes of a file that use a word, or that use another one which does."""
    pattern = re.compile("|".join(rf"(?<![\w]){re.escape(word)}(?![\w])" for word in sorted(words)))
    text = Path(path).read_text(encoding="utf-8")
    parts: dict[str, str] = {}
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            ]
        first = min((each.lineno for each in getattr(node, "decorator_list", [])), default=node.lineno)
        parts |= dict.fromkeys(names, "\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    found: set[str] = set()
    while more := {name for name, source in parts.items() if name not in found and pattern.search(source)}:
        found |= more
        pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w])" for name in sorted(found)))
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that use what is gone."""
    words = os.environ[GONE].split()
    using = {path: uses(path, words) for path in {str(item.path) for item in items}}
    left_out = [
        item
        for item in items
        if re.split(r"[\[:]+", item.nodeid.partition("::")[2])[0] in using[str(item.path)]
        or any(word in re.findall(r"\w+", item.name.partition("[")[2]) for word in words)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in {*left_out}]


def are_leaves(chosen: Collection[str], processes: int) -> bool:
    """Take leaves away in a copy of the repository and run the tests of the rest. Print what was wrong."""
    name = ", ".join(chosen)
    with tempfile.TemporaryDirectory(prefix="raysgd-leaf-") as place:
        folder = Path(place, "raysgd")
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for each in filter(None, files.split("\0")):
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / each, folder / each, follow_symlinks=False)
        try:
            words = take(folder, chosen)
        except ValueError as error:
            print(f"{name}: no leaf\n{error}")
            return False
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-m", CHOICE, "-p", "tests.leaves", "--tb=line"]
        command += [f"--{'deselect' if '::' in each else 'ignore'}={each}" for each in LEFT_OUT]
        command += ["--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
        tests = subprocess.run(
            [*command, "--disable-warnings"],
            cwd=folder,
            env=os.environ | {GONE: " ".join(sorted(words)), "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    lines = tests.stdout.splitlines()
    print(f"{name}: {'a leaf' if tests.returncode == 0 else 'no leaf'}, {lines[-1] if lines else tests.stderr}")
    if tests.returncode:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))
    return tests.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.leaves", description=__doc__.partition("\n")[0])
    parser.add_argument("leaves", nargs="*", metavar="LEAF", help=f"one of {', '.join(LEAVES)}; default: all")
    parser.add_argument("--together", action="store_true", help="delete all of them, and run the tests once")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="name the leaves, and run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(LEAVES))
        return
    if unknown := {*arguments.leaves} - LEAVES.keys():
        parser.error(f"no leaf: {', '.join(sorted(unknown))}. There are {', '.join(LEAVES)}.")
    chosen = arguments.leaves or list(LEAVES)
    groups = [chosen] if arguments.together else [[name] for name in chosen]
    right = [are_leaves(group, arguments.processes) for group in groups]
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
