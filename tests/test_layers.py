"""Who may import whom.

The rules are those of the architecture: a small core that knows no framework, front ends that do not know
each other, and leaves that nobody needs. They are read off the source, so they hold also for imports inside
functions, which no run of the tests may ever reach. Imports for type checkers only are left out: nothing runs
them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

UTILITIES = {
    "raysgd.exceptions",
    "raysgd._atomic_file",
    "raysgd._background_writer",
    "raysgd._cards",
    "raysgd._checks",
    "raysgd._example_arguments",
    "raysgd._lazy",
    "raysgd._logging",
    "raysgd._meters",
    "raysgd._nested",
    "raysgd._once",
    "raysgd._optional",
    "raysgd._paths",
    "raysgd._ranking",
    "raysgd._ranks",
    "raysgd._ray_data",
    "raysgd._secrets",
    "raysgd._timers",
    "raysgd._version",
    "raysgd.compat.names",
}
ENGINE_MODULES_WITH_RAY = {"gathering", "reservation_guard", "resources", "startup", "transfers", "worker"}
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "apex", "lightning", "pytorch_lightning"}
FRONT_ENDS = {"torch", "tf", "train", "data"}
# Parallel iterators and data frames in shards need nothing but utilities until somebody asks for a framework's dataset.
OUT_OF_UTIL = {"raysgd.torch.torch_dataset", "raysgd.tf.tf_dataset"}
TRIALS = {
    "raysgd.tf.tf_trainable",
    "raysgd.torch.torch_trainable",
    "raysgd.train._tune",
    "raysgd.train.fit.space",
    "raysgd.train.fit.tuned",
}
"""What describes a trial of Ray Tune, beside `raysgd.tune`."""
LEAVES = {"raysgd.cli", "raysgd.horovod", "raysgd.operators", "raysgd.tune", "examples"}
# The function-based front end wraps models, and marks datasets, with what the class-based one has.
ALLOWED_BETWEEN_FRONT_ENDS = {
    ("raysgd.data.examples", "raysgd.tf"),  # they train with it
    ("raysgd.data.examples", "raysgd.torch"),
    ("raysgd.train._torch", "raysgd.torch.ddp"),
    ("raysgd.train._torch", "raysgd.torch.fsdp"),
    ("raysgd.train._torch", "raysgd.torch.options"),
    ("raysgd.train._torch", "raysgd.torch.parallel"),
    ("raysgd.train._torch", "raysgd.torch.precision"),
    ("raysgd.train._torch", "raysgd.torch.sample_order"),
    ("raysgd.train.tensorflow", "raysgd.tf.datasets"),
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and where it stands."""

    importer: str
    target: str
    line: int
    in_function: bool

    def is_of(self, *packages: str) -> bool:
        """Tell whether the target is one of these packages or something inside one."""
        return any(self.target == package or self.target.startswith(package + ".") for package in packages)

    def __str__(self) -> str:
        """Say it in words, for the message of a failed test."""
        return f"{self.importer} imports {self.target} in line {self.line}"


class Collector(ast.NodeVisitor):
    """Collects the imports of one module."""

    def __init__(self, importer: str) -> None:
        self.importer = importer
        self.found: list[Import] = []
        self.depth = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        # `from a import b` may mean the module `a.b` or a name in `a`; as a target, `a.b` covers both.
        for alias in node.names:
            self.add(f"{'.' * node.level}{node.module or ''}.{alias.name}", node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)
        else:
            for statement in node.orelse:
                self.visit(statement)

    def add(self, target: str, node: ast.stmt) -> None:
        self.found.append(Import(self.importer, target, node.lineno, self.depth > 0))


def imports_in(source: str, importer: str = "module") -> list[Import]:
    collector = Collector(importer)
    collector.visit(ast.parse(source))
    return collector.found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"raysgd.{name}" if parts[0] == "operators" else name


def modules_of(*folders: str) -> Iterator[tuple[str, list[Import]]]:
    """Yield each module under these folders of the repository with what it imports."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield module_name(path), imports_of_file(path)


@functools.cache
def imports_of_file(path: Path) -> list[Import]:
    """What a module imports; it is read once for all rules."""
    return imports_in(path.read_text(encoding="utf-8"), module_name(path))


def imports_of(*folders: str) -> list[Import]:
    return [found for _, imports in modules_of(*folders) for found in imports]


def words(imports: Iterable[Import]) -> list[str]:
    return [str(found) for found in imports]


def package_of(name: str) -> str:
    """Return the second part of a dotted name: `torch` for `raysgd.torch.resnet`."""
    return [*name.split("."), ""][1]


def test_utilities_import_nothing_else_from_the_package() -> None:
    found = [
        found
        for found in imports_of("raysgd")
        if found.importer in UTILITIES and found.is_of("raysgd") and not found.is_of(*UTILITIES)
    ]
    assert words(found) == []


def test_the_top_of_the_package_loads_only_utilities() -> None:
    found = [found for found in imports_of("raysgd") if found.importer == "raysgd" and not found.in_function]
    assert (
        words(
            found
            for found in found
            if found.is_of("raysgd", "ray", "numpy", *FRAMEWORKS) and not found.is_of(*UTILITIES)
        )
        == []
    )


def test_the_engine_knows_no_framework_and_no_tune() -> None:
    found = [found for found in imports_of("raysgd/engine") if found.is_of("ray.tune", *FRAMEWORKS)]
    assert words(found) == []


def test_the_engine_stands_on_itself_and_the_utilities() -> None:
    found = imports_of("raysgd/engine")
    assert (
        words(found for found in found if found.is_of("raysgd") and not found.is_of("raysgd.engine", *UTILITIES)) == []
    )


def test_one_module_knows_what_a_trial_of_tune_is_and_only_trials_import_it() -> None:
    found = imports_of("raysgd", "operators")
    others = [found for found in found if found.importer not in TRIALS and package_of(found.importer) != "tune"]
    assert words(found for found in others if found.is_of("raysgd._trials")) == []
    own = [found for found in found if found.importer == "raysgd._trials"]
    assert words(found for found in own if found.is_of("raysgd") and not found.is_of(*UTILITIES)) == []


def test_ray_tune_is_loaded_late() -> None:
    found = [found for found in imports_of("raysgd", "operators") if found.is_of("ray.tune")]
    assert words(found for found in found if not found.in_function) == []


def test_only_a_few_modules_of_the_engine_know_ray() -> None:
    found = [
        found
        for found in imports_of("raysgd/engine")
        if found.is_of("ray") and found.importer.rpartition(".")[2] not in ENGINE_MODULES_WITH_RAY
    ]
    assert words(found) == []


def test_connections_stand_on_the_engine_and_the_utilities() -> None:
    found = imports_of("raysgd/connections")
    allowed = ("raysgd.engine", "raysgd.connections", *UTILITIES)
    assert words(found for found in found if found.is_of("raysgd") and not found.is_of(*allowed)) == []


def test_connections_load_a_framework_only_inside_functions() -> None:
    found = [found for found in imports_of("raysgd/connections") if not found.in_function]
    with_framework = "raysgd.connections._store"  # its class is derived from PyTorch's
    assert words(found for found in found if found.is_of(*FRAMEWORKS) and found.importer != with_framework) == []
    assert words(found for found in found if found.is_of(with_framework)) == []


def test_replicas_stand_on_the_engine_and_know_no_framework() -> None:
    found = imports_of("raysgd/replicas")
    # `fit` calls callbacks, and those read histories: neither is of any use without the other. Trainers write files.
    own = ("raysgd.replicas", "raysgd.callbacks", "raysgd.storage")
    allowed = ("raysgd.engine", *own, "raysgd.utils", "raysgd._fitting", *UTILITIES)
    assert words(found for found in found if found.is_of("raysgd") and not found.is_of(*allowed)) == []
    assert words(found for found in found if found.is_of("ray.tune", *FRAMEWORKS)) == []


def test_callbacks_stand_on_histories_writers_and_storage_and_load_a_framework_only_inside_functions() -> None:
    found = imports_of("raysgd/callbacks")
    shown = ("history", "history_views", "charts", "readable")  # what reports and bars show, and how
    histories = tuple(f"raysgd.replicas.{name}" for name in shown)
    bins = "raysgd.engine.time_spent"  # pure: what the time of a rank is called
    allowed = ("raysgd.callbacks", *histories, bins, "raysgd.storage", "raysgd.utils", "raysgd.writers", *UTILITIES)
    at_import = [found for found in found if not found.in_function]
    assert words(found for found in at_import if found.is_of("raysgd") and not found.is_of(*allowed)) == []
    assert words(found for found in at_import if found.is_of("ray", "ray.tune", *FRAMEWORKS)) == []


def test_storage_stands_on_the_utilities_and_knows_neither_ray_nor_a_framework() -> None:
    found = imports_of("raysgd/storage")
    assert (
        words(found for found in found if found.is_of("raysgd") and not found.is_of("raysgd.storage", *UTILITIES)) == []
    )
    assert words(found for found in found if found.is_of("ray", *FRAMEWORKS)) == []
    assert words(found for found in found if found.is_of("pyarrow", "fsspec") and not found.in_function) == []


def test_writers_stand_on_the_utilities_and_know_neither_ray_nor_a_framework() -> None:
    found = imports_of("raysgd/writers")
    assert (
        words(found for found in found if found.is_of("raysgd") and not found.is_of("raysgd.writers", *UTILITIES)) == []
    )
    assert words(found for found in found if found.is_of("ray", *FRAMEWORKS)) == []
    assert words(found for found in found if found.is_of("tensorboardX", "mlflow", "wandb", "comet_ml")) == []


def test_the_values_of_a_run_stand_on_storage_and_the_utilities() -> None:
    found = imports_of("raysgd/air")
    allowed = ("raysgd.air", "raysgd.storage", *UTILITIES)
    assert words(found for found in found if found.is_of("raysgd") and not found.is_of(*allowed)) == []
    assert words(found for found in found if found.is_of("ray", "pandas", *FRAMEWORKS) and not found.in_function) == []


def test_functions_do_not_know_what_operators_share() -> None:
    found = [found for found in imports_of("raysgd/train") if found.is_of("raysgd.replicas")]
    assert words(found) == []


def test_front_ends_do_not_know_each_other() -> None:
    found = [
        found
        for found in imports_of(*(f"raysgd/{name}" for name in sorted(FRONT_ENDS)))
        if found.is_of(*(f"raysgd.{name}" for name in FRONT_ENDS))
        and package_of(found.importer) != package_of(found.target)
        and not any(
            f"{found.importer}.".startswith(f"{importer}.") and found.is_of(target)
            for importer, target in ALLOWED_BETWEEN_FRONT_ENDS
        )
    ]
    assert words(found) == []


def test_iterators_stand_on_the_utilities_and_load_a_framework_only_when_asked() -> None:
    found = [found for found in imports_of("raysgd/util") if found.is_of("raysgd", "ray", *FRAMEWORKS)]
    allowed = ("raysgd.util", *UTILITIES)
    assert words(found for found in found if not found.is_of(*allowed, *OUT_OF_UTIL)) == []
    assert words(found for found in found if not found.is_of(*allowed) and not found.in_function) == []


def test_datasets_stand_on_iterators() -> None:
    found = [found for found in imports_of("raysgd/data") if not found.importer.startswith("raysgd.data.examples.")]
    allowed = ("raysgd.data", "raysgd.util", *UTILITIES)
    assert words(found for found in found if found.is_of("raysgd") and not found.is_of(*allowed)) == []


def test_nobody_imports_a_leaf_but_lazily() -> None:
    found = [
        found
        for found in imports_of("raysgd")
        if found.is_of(*LEAVES) and not found.in_function and package_of(found.importer) != package_of(found.target)
    ]
    assert words(found) == []


def test_the_core_does_not_import_a_leaf_at_all() -> None:
    found = imports_of("raysgd/engine", "raysgd/connections")
    assert words(found for found in found if found.is_of(*LEAVES)) == []


def test_operators_use_public_modules_only() -> None:
    found = [found for found in imports_of("operators") if found.is_of("raysgd")]
    # The package finds its operators with the first; the second says how to install what an operator stands on.
    found = [found for found in found if found.importer != "raysgd.operators" or not found.is_of("raysgd._lazy")]
    found = [found for found in found if not found.is_of("raysgd._optional")]
    assert words(found for found in found if "._" in found.target or found.is_of("raysgd.engine")) == []


def test_nothing_but_a_comparison_imports_ray_train() -> None:
    found = [found for found in imports_of("raysgd", "operators", "examples", "tests") if found.is_of("ray.train")]
    allowed = ("examples.benchmarks.", "tests.compat.programs.")  # old programs import what they always did
    assert words(found for found in found if not found.importer.startswith(allowed)) == []


def test_the_operators_are_imported_by_their_full_name() -> None:
    found = imports_of("raysgd", "operators", "examples", "tests")
    assert words(found for found in found if found.is_of("operators")) == []


def test_imports_are_absolute() -> None:
    found = imports_of("raysgd", "operators", "examples", "tests")
    assert words(found for found in found if found.target.startswith(".")) == []


def test_the_rules_name_what_exists() -> None:
    modules = {name for name, _ in modules_of("raysgd", "operators")}
    named = UTILITIES | LEAVES | TRIALS | OUT_OF_UTIL | {name for pair in ALLOWED_BETWEEN_FRONT_ENDS for name in pair}
    assert named - {"examples"} - modules == set()
    assert {f"raysgd.{name}" for name in FRONT_ENDS} | {
        f"raysgd.engine.{name}" for name in ENGINE_MODULES_WITH_RAY
    } <= modules


class TestTheReadingOfImports:
    """The rules above are worth as much as this."""

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            ("import ray.train", "ray.train"),
            ("import ray.train as t", "ray.train"),
            ("from ray import train", "ray.train"),
            ("from ray.train import report", "ray.train.report"),
            ("from ray.train.torch import TorchTrainer", "ray.train.torch.TorchTrainer"),
        ],
    )
    def test_sees_every_form(self, source: str, target: str) -> None:
        [found] = imports_in(source)
        assert found.target == target
        assert found.is_of("ray.train")

    @pytest.mark.parametrize(
        "source", ["import ray", "import ray.training", "from ray import tune", "import operators_x"]
    )
    def test_does_not_mistake_one_name_for_another(self, source: str) -> None:
        [found] = imports_in(source)
        assert not found.is_of("ray.train", "operators")

    @pytest.mark.parametrize("source", ["from . import x", "from .. import x", "from .a import x"])
    def test_sees_relative_imports(self, source: str) -> None:
        assert imports_in(source)[0].target.startswith(".")

    def test_knows_what_stands_inside_a_function(self) -> None:
        in_class = "class C:\n    import b\n    def f(self):\n        import c\n"
        source = f"import a\n{in_class}async def g():\n    import d\n"
        assert [(found.target, found.in_function) for found in imports_in(source)] == [
            ("a", False),
            ("b", False),
            ("c", True),
            ("d", True),
        ]

    def test_leaves_out_what_only_type_checkers_read(self) -> None:
        source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\nif typing.TYPE_CHECKING:\n    import c\n"
        assert [found.target for found in imports_in(source)] == ["b"]

    def test_finds_the_modules_of_this_repository(self) -> None:
        names = [name for name, _ in modules_of("raysgd", "operators")]
        assert {"raysgd", "raysgd.utils", "raysgd.torch.resnet", "raysgd.operators"} <= set(names)


def needed_at_import(name: str) -> set[str]:
    """Return the modules of the package that importing this one loads, whatever Python adds for the packages above."""
    imports = dict(modules_of("raysgd", "operators"))
    found, open_ends = set[str](), [name]
    while open_ends:
        module = open_ends.pop()
        if module in imports and module not in found:
            found.add(module)
            at_import = [one.target for one in imports[module] if not one.in_function]
            open_ends += [*at_import, *(target.rpartition(".")[0] for target in at_import)]
    return found


@pytest.mark.parametrize("runner", ["raysgd.torch.torch_runner", "raysgd.tf.tf_runner"])
def test_workers_start_without_the_half_of_the_engine_that_is_the_drivers(runner: str) -> None:
    assert "raysgd.replicas.runner" in needed_at_import(runner)
    assert "raysgd.engine.controller" not in needed_at_import(runner)
