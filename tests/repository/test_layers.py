"""Who may import whom.

The rules are those of the architecture: a small core that knows no framework, front ends that do not know
each other, and leaves that nobody needs. They are read off the source, so they hold also for imports inside
functions, which no run of the tests may ever reach. Imports for type checkers only load nothing; they count where a
rule is about what a reader has to know first: which parts a part stands on, and circles.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STANDS_ON = {
    "_version": "",
    "exceptions": "",
    "core": "exceptions",
    "compat": "core",
    "horovod": "core",
    "utils": "core",
    "storage": "core exceptions",
    "air": "core exceptions storage",
    "detached": "_version core exceptions storage",
    "streams": "core exceptions storage",
    "testing": "core exceptions storage",
    "callbacks": "_version air core exceptions storage",
    "journal": "_version callbacks core",
    "trainer": "callbacks core detached exceptions journal storage",
    "tf": "compat core detached exceptions storage streams trainer utils",
    "torch": "callbacks compat core detached exceptions storage streams trainer utils",
    "replay": "callbacks core journal storage streams torch trainer",
    "cli": "_version air callbacks compat core detached exceptions replay storage torch utils",
    "operators": "core streams torch utils",
    "train": "air callbacks compat core detached exceptions storage streams tf torch trainer utils",
    "util": "core tf torch",
    "__main__": "cli",
    "data": "core streams tf torch util",
    "tune": "air callbacks core exceptions storage torch train trainer",
    "v2": "core exceptions train",
}
"""The parts of the package, the lowest first, each with the parts that it imports from: all of them stand before it."""
INSIDE = {
    "core": (
        "config_keys imports memory state tables text",
        "private_names synonyms",
        "arguments files numbers sending worker_errors",
        "cluster writers",
        "engine",
        "arrays connections history",
    ),
    "core.connections": ("_compiler _origins mesh", "_gloo group horovod", "tensorflow torch"),
    "air": (
        "constants reports",
        "checkpoint config trial",
        "result session",
        "integrations",
        "callbacks",
    ),
    "callbacks": (
        "worker_callback",
        "callback",
        "averages calling loggers monitors progress report sidecar",
        "early_stopping guard",
        "checkpointing",
    ),
    "core.engine": (
        "shared",
        "policies",
        "placement",
        "worker",
        "transfers",
        "platform",
        "gathering",
        "standby",
        "group",
        "snapshots",
        "lifecycle",
        "monitor",
        "recovery",
        "controller",
    ),
    "core.cluster": ("call_lines keeper resources", "ray_cluster"),
    "tf": (
        "objects tf_dataset",
        "checkpoints parallel",
        "data",
        "fit",
        "training_operator",
        "creator_operator",
        "hosting",
        "tf_runner",
        "driver",
        "tf_trainer",
        "tf_trainable",
        "examples",
    ),
    "torch": (
        "constants func_trainable lightning objects operators_for_tests resnet torch_dataset",
        "checkpoints utils",
        "parallel",
        "data",
        "building_blocks step",
        "operator",
        "training_operator",
        "creator_operator hosting lightning_operator",
        "torch_runner",
        "driver",
        "torch_trainer",
        "examples torch_trainable",
    ),
    "train": (
        "backend constants error predictor utils",
        "_worker callbacks",
        "_torch batch_predictor checkpoint collective session tensorflow worker_group",
        "_workers horovod huggingface lightning torch train_loop_utils",
        "_function_run",
        "executor",
        "fit",
        "base_trainer trainer",
        "_tune data_parallel_trainer",
        "examples",
    ),
    "trainer": ("configuration", "messages", "driver worker"),
    "trainer.driver": (
        "detachable leaving listeners saving shared_data tune_trial",
        "life",
        "calls kept_trainer live_changes",
        "fit_epoch",
        "fit_loop",
        "trainer",
    ),
    "trainer.worker": (
        "feed ledger rank_rows",
        "replica_state step_loop",
        "worker_callbacks",
        "operator",
        "hosted",
        "training_call",
        "runner",
    ),
}
"""The same inside the large parts: folders, and modules that stand in the part itself."""

MADE_LATE = {
    ("raysgd.tf.training_operator", "raysgd.tf.creator_operator"),
    ("raysgd.torch.torch_trainer", "raysgd.torch.torch_trainable"),
    ("raysgd.torch.training_operator", "raysgd.torch.creator_operator"),
    ("raysgd.torch.training_operator", "raysgd.torch.lightning_operator"),
    ("raysgd.train.base_trainer", "raysgd.train._tune"),
    ("raysgd.train.trainer", "raysgd.train._tune"),
}
"""The only arrows up: a method of a class makes an object of one of its subclasses, or a class that wraps it."""

NO_FRAMEWORK = (
    "core/arguments core/arrays core/cluster core/engine core/files core/history core/imports core/numbers "
    "core/state/strict_reading core/text core/worker_errors core/writers storage trainer"
)
ENGINE_MODULES_WITH_RAY = {
    "placement",
    "platform",
    "transfers",
    "worker",
}
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "apex", "lightning", "pytorch_lightning"}
TRIALS = {
    "raysgd.tf.tf_trainable",
    "raysgd.torch.torch_trainable",
    "raysgd.train._tune",
}
"""What describes a trial of Ray Tune, beside `raysgd.tune`."""
# Data frames in shards need no framework until somebody asks for a dataset of one; the examples train with both.
FRAMEWORKS_OF_DATA = {"raysgd.tf.tf_dataset", "raysgd.torch.torch_dataset"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and where it stands."""

    importer: str
    target: str
    line: int
    in_function: bool
    for_types: bool = False

    def is_of(self, *packages: str) -> bool:
        """Tell whether the target is one of these packages or something inside one."""
        return any(self.target == package or self.target.startswith(package + ".") for package in packages)

    def __str__(self) -> str:
        """Say it in words, for the message of a failed test."""
        return f"{self.importer} imports {self.target} in line {self.line}"


class Collector(ast.NodeVisitor):
    """Collects the imports of one module."""

    def __init__(self, importer: str, for_types: bool = False) -> None:
        self.importer = importer
        self.found: list[Import] = []
        self.depth = 0
        self.for_types = for_types

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
        self.for_types = "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body:
            self.visit(statement)
        self.for_types = False
        for statement in node.orelse:
            self.visit(statement)

    def add(self, target: str, node: ast.stmt) -> None:
        self.found.append(Import(self.importer, target, node.lineno, self.depth > 0, self.for_types))


def imports_in(source: str, importer: str = "module", for_types: bool = False) -> list[Import]:
    collector = Collector(importer, for_types)
    collector.visit(ast.parse(source))
    return collector.found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"raysgd.{name}" if parts[0] == "operators" else name


def modules_of(*folders: str) -> Iterator[tuple[str, list[Import]]]:
    """Yield each module under these folders of the repository with what it imports when it runs."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")) or [(ROOT / folder).with_suffix(".py")]:
            yield module_name(path), [found for found in imports_of_file(path) if not found.for_types]


@functools.cache
def imports_of_file(path: Path) -> list[Import]:
    """Return what a module imports, or its file for type checkers names; it is read once for all rules."""
    return imports_in(path.read_text(encoding="utf-8"), module_name(path), for_types=path.suffix == ".pyi")


def imports_of(*folders: str) -> list[Import]:
    return [found for _, imports in modules_of(*folders) for found in imports]


def words(imports: Iterable[Import]) -> list[str]:
    return [str(found) for found in imports]


def part_of(name: str) -> str:
    """Return the part that a module stands in: `torch` for `raysgd.torch.resnet`."""
    return name.split(".")[1] if "." in name else ""


def place_in(part: str, name: str) -> str:
    """Return where a module stands inside a part: `parallel` for `torch` and `raysgd.torch.parallel.undo`; else ""."""
    rest = name.removeprefix(f"raysgd.{part}.")
    return "" if rest == name else rest.split(".")[0]


def layer_of(place: str, layers: Sequence[str]) -> int:
    """Return the number of the layer that a part stands on."""
    return next(number for number, parts in enumerate(layers) if place in parts.split())


def module_in(target: str, modules: Collection[str]) -> str:
    """Return the module that the target of an import is, or that it is a name in."""
    return target if target in modules or "." not in target else module_in(target.rpartition(".")[0], modules)


@functools.cache
def arrows() -> list[tuple[Import, str]]:
    """Return every import of one module of the package by another, also for types, with the module that it leads to."""
    paths = [path for folder in ("raysgd", "operators") for path in sorted((ROOT / folder).rglob("*.py*"))]
    paths = [path for path in paths if path.suffix in (".py", ".pyi")]
    modules = {module_name(path) for path in paths}
    found = [each for path in paths for each in imports_of_file(path)]
    own = [each for each in found if each.is_of("raysgd") and each.importer != "raysgd"]
    return [(each, module_in(each.target, modules)) for each in own]


def test_the_table_has_every_part_above_those_that_it_imports_from() -> None:
    parts = sorted({part_of(name) for name, _ in modules_of("raysgd", "operators")} - {""})
    assert sorted(STANDS_ON) == parts
    layers: dict[str, int] = {}
    for part, below in STANDS_ON.items():
        layers[part] = 1 + max((layers[each] for each in below.split()), default=0)  # which are in it by now
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    groups = re.findall(
        r"^(?:\w+ {3,}.*|          (.+))$", page.partition("```text\n")[2].partition("```")[0], re.MULTILINE
    )
    inside = [*INSIDE["trainer"], *INSIDE["core"], *STANDS_ON]
    listed = {*" ".join(inside).split()} - {"__main__", "_version", "core", "exceptions", "trainer"} | {"exceptions"}
    assert sorted(" ".join(groups).split()) == sorted(listed)
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page.partition("| layer | parts |")[2], flags=re.MULTILINE)
    assert {part: int(layer) for layer, named in rows for part in re.findall(r"`(\w+)`", named)} == layers
    for part, inside in INSIDE.items():
        found = {place_in(part, name) for name, _ in modules_of("raysgd")} - {""}
        placed = {*" ".join(inside).split()}
        assert found - placed == set(), f"put it into a layer of INSIDE[{part!r}]: above what it imports"
        assert placed - found == set(), f"INSIDE[{part!r}] names what is gone"


def test_parts_import_from_those_that_the_table_says_and_no_others() -> None:
    across = [(found, part_of(found.importer), part_of(module)) for found, module in arrows() if module != "raysgd"]
    assert [str(found) for found, here, there in across if here != there and there not in STANDS_ON[here].split()] == []
    used = {(here, there) for _, here, there in across}
    assert [
        (part, each) for part, below in STANDS_ON.items() for each in below.split() if (part, each) not in used
    ] == []


def test_imports_lead_to_lower_layers_inside_the_large_parts() -> None:
    assert [
        str(found)
        for part, layers in INSIDE.items()
        for found, module in arrows()
        if not found.for_types
        and (found.importer, module) not in MADE_LATE
        and (here := place_in(part, found.importer))
        and (there := place_in(part, module))
        and here != there
        and layer_of(here, layers) <= layer_of(there, layers)
    ] == [], "move the code down, or the importing module up in INSIDE"


def test_no_modules_import_each_other_in_a_circle() -> None:
    imported: dict[str, set[str]] = {}
    for found, module in arrows():
        if module not in ("raysgd", found.importer) and (found.importer, module) not in MADE_LATE:
            imported.setdefault(found.importer, set()).add(module)
    while free := [name for name, targets in imported.items() if not targets & imported.keys()]:
        for name in free:  # it leads to none that is in a circle
            del imported[name]
    assert {name: sorted(targets & imported.keys()) for name, targets in sorted(imported.items())} == {}


def test_the_top_of_the_package_loads_only_the_lowest_layer() -> None:
    found = [found for found in imports_of("raysgd") if found.importer == "raysgd" and not found.in_function]
    lowest = ["raysgd._version", *(f"raysgd.core.{part}" for part in INSIDE["core"][0].split())]
    assert (
        words(each for each in found if each.is_of("raysgd", "ray", "numpy", *FRAMEWORKS) and not each.is_of(*lowest))
        == []
    )


def test_the_lower_half_knows_no_framework_and_no_tune() -> None:
    found = imports_of(*(f"raysgd/{part}" for part in NO_FRAMEWORK.split()))
    own = "raysgd.trainer.driver.tune_trial"  # says what a trial is
    assert words(each for each in found if each.is_of("ray.tune", *FRAMEWORKS) and each.importer != own) == []


def test_files_are_stored_and_metrics_written_without_ray() -> None:
    found = imports_of("raysgd/storage", "raysgd/core/writers")
    assert words(each for each in found if each.is_of("ray")) == []
    late = ("pyarrow", "fsspec", "tensorboardX", "mlflow", "wandb", "comet_ml")
    assert words(each for each in found if each.is_of(*late) and not each.in_function) == []


def test_only_a_few_modules_of_the_engine_know_ray() -> None:
    found = [
        found
        for found in imports_of("raysgd/core/engine")
        if found.is_of("ray") and found.importer.rpartition(".")[2] not in ENGINE_MODULES_WITH_RAY
    ]
    assert words(found) == []


def test_connections_load_a_framework_only_inside_functions() -> None:
    found = [found for found in imports_of("raysgd/core/connections") if not found.in_function]
    with_framework = "raysgd.core.connections.mesh.store"  # its class is derived from PyTorch's
    assert words(found for found in found if found.is_of(*FRAMEWORKS) and found.importer != with_framework) == []
    assert words(found for found in found if found.is_of(with_framework)) == []


def test_callbacks_and_values_of_runs_load_ray_and_frameworks_only_inside_functions() -> None:
    needs_package = "raysgd.air.integrations."
    found = imports_of("raysgd/callbacks", "raysgd/air", "raysgd/util")
    found = [each for each in found if not each.importer.startswith(needs_package)]
    assert words(each for each in found if each.is_of("ray", "pandas", *FRAMEWORKS) and not each.in_function) == []


def test_iterators_and_datasets_load_a_framework_only_when_asked() -> None:
    found = [each for each in imports_of("raysgd/util", "raysgd/data") if each.is_of("raysgd.torch", "raysgd.tf")]
    found = [each for each in found if not each.importer.startswith("raysgd.data.examples.")]  # they train with both
    assert words(each for each in found if not each.is_of(*FRAMEWORKS_OF_DATA) or not each.in_function) == []


def test_one_module_knows_what_a_trial_of_tune_is_and_only_trials_import_it() -> None:
    found = imports_of("raysgd", "operators")
    others = [found for found in found if found.importer not in TRIALS and part_of(found.importer) != "tune"]
    assert words(found for found in others if found.is_of("raysgd.trainer.driver.tune_trial")) == []


def test_ray_tune_is_loaded_late() -> None:
    found = [found for found in imports_of("raysgd", "operators") if found.is_of("ray.tune")]
    assert words(found for found in found if not found.in_function) == []


def test_operators_use_public_modules_only() -> None:
    found = [(each, module) for each, module in arrows() if each.importer.startswith("raysgd.operators.")]
    assert words(each for each, module in found if "._" in each.target or is_private(module)) == []


def is_private(module: str) -> bool:
    """Tell whether a path may change in any release: in `core` or `trainer`, or in a folder inside a door."""
    _, part, *inside = module.split(".")
    is_folder = bool(inside) and (ROOT / "raysgd" / part / inside[0]).is_dir()
    return part in ("core", "trainer") or is_folder


def test_nothing_but_a_comparison_imports_ray_train() -> None:
    found = [found for found in imports_of("raysgd", "operators", "examples", "tests") if found.is_of("ray.train")]
    # Old programs import what they always did, and the tables of names are compared with what Ray has today.
    allowed = ("examples.benchmarks.", "tests.compat.programs.", "tests.compat.test_paths")
    assert words(found for found in found if not found.importer.startswith(allowed)) == []


def test_the_operators_are_imported_by_their_full_name() -> None:
    found = imports_of("raysgd", "operators", "examples", "tests")
    assert words(found for found in found if found.is_of("operators")) == []


def test_imports_are_absolute() -> None:
    found = imports_of("raysgd", "operators", "examples", "tests")
    assert words(found for found in found if found.target.startswith(".")) == []


def test_the_rules_name_what_exists() -> None:
    modules = {name for name, _ in modules_of("raysgd", "operators")}
    assert TRIALS | {name for pair in MADE_LATE for name in pair} <= modules
    assert {
        name.rpartition(".")[2] for name in modules if name.startswith("raysgd.core.engine.")
    } >= ENGINE_MODULES_WITH_RAY


SOURCE = """
import ray.train as t
class C:
    from ray import train
    def f(self):
        from ray.train.torch import TorchTrainer
if typing.TYPE_CHECKING:
    import a
else:
    async def g(): import ray.train
"""


def test_imports_of_every_form_and_place_are_seen() -> None:
    assert [(found.target, found.in_function, found.for_types) for found in imports_in(SOURCE)] == [
        ("ray.train", False, False),
        ("ray.train", False, False),
        ("ray.train.torch.TorchTrainer", True, False),
        ("a", False, True),
        ("ray.train", True, False),
    ]


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


DRIVER = (
    "raysgd.trainer.driver",
    "raysgd.core.engine.lifecycle",
    "raysgd.core.engine.monitor",
    "raysgd.core.engine.recovery",
    "raysgd.core.engine.controller",
    "raysgd.core.engine.group",
    "raysgd.core.engine.snapshots",
    "raysgd.core.engine.standby",
    "raysgd.core.history",
    "raysgd.callbacks.callback",
    "raysgd.torch.driver",
    "raysgd.torch.torch_trainer",
    "raysgd.tf.driver",
    "raysgd.tf.tf_trainer",
)
"""What only the driver needs; `tests/trainer/worker/test_loaded_modules.py` looks at real workers."""


@pytest.mark.parametrize(
    "runner",
    [
        "raysgd.torch.torch_runner",
        "raysgd.tf.tf_runner",
        "raysgd.train._worker.function_replica",
        "raysgd.train.tensorflow",
        "raysgd.train.torch",
    ],
)
def test_workers_start_without_the_modules_of_the_driver(runner: str) -> None:
    loaded = needed_at_import(runner)
    assert runner in loaded
    assert [name for name in sorted(loaded) if f"{name}.".startswith(tuple(f"{each}." for each in DRIVER))] == []


def test_the_call_trees_name_functions_of_the_files_beside_them() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    frames = re.findall(r"^ *(?:\w+\.)?(\w+)(?: \(PyTorch\))? +([\w/]+\.py)\b", page, flags=re.MULTILINE)
    assert len(frames) > 60
    assert [
        f"{name} {file}"
        for name, file in frames
        if not re.search(
            rf"(def|class) {name}\b|^    {name}: ", (ROOT / "raysgd" / file).read_text("utf-8"), re.MULTILINE
        )
    ] == []
