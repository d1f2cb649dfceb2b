"""The table of other projects' private names: it is complete, it is true, and each name may go."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata, util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from raysgd.air.session import tune_here
from raysgd.core.cluster import ray_cluster
from raysgd.core.cluster.ray_cluster import RayThreads, delaying_shutdown, keep_threads_from_starting_ray
from raysgd.core.connections import _compiler
from raysgd.core.connections.horovod import HorovodConnection
from raysgd.core.connections.torch import end_process_group, is_connection_error
from raysgd.core.engine.platform import Platform
from raysgd.core.engine.shared.types import World
from raysgd.core.private_names import PrivateNames, missing_names, private_names, versions_tested
from raysgd.core.tables import read_table
from raysgd.detached import cluster
from raysgd.exceptions import IncompatibleModelError, InvalidRegistrationError
from raysgd.streams.formats import HuggingFaceStream
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.objects import datasets, registration
from raysgd.tf.parallel import keras_sync
from raysgd.torch.data import sampling
from raysgd.torch.objects import criteria, hyperparameters, loading, metric_objects, models, remade
from raysgd.torch.parallel import strategy, undo
from raysgd.torch.parallel.horovod_parallel import HorovodParallel
from raysgd.torch.parallel.undo import OpenStep
from raysgd.torch.step import advice
from raysgd.train._torch import global_steps
from raysgd.train.fit import fit_session
from tests.helpers.fakes import meeting
from tests.helpers.run_if import RunIf

ROOT = Path(__file__).resolve().parents[2]
TABLE, TESTED = private_names(), versions_tested()

DOCUMENTED = {"_fields", "_replace", "_asdict", "_exit", "_current_frames", "_getframe", "_repr_html_"}
"""Names that the documentation of Python and IPython has."""
OURS = {"self", "cls", "trainer", "trainer_cls", "_trainer", "replica"}
"""Variables with objects of raysgd, also where their classes are not imported."""
GIVEN = {"_is_of_raysgd", "_is_global", "_goes_through_scaler", "_train", "__execute"}
"""Names that raysgd gives to functions of others, and that others give to classes of raysgd."""
KEYS = {"_timestamp", "_time_this_iter_s", "_group_", "_ray_additional_checkpoint_files"}
KEYS |= {"_growth_tracker", "_scale_fn_custom", "_anneal_func_type", "_anneal_strategy", "_schedule_phases"}
KEYS |= {"_get_lr_called_within_step", "_is_initial", "_last_lr"}
"""Keys and files that Ray and PyTorch write, and have written."""
APART = r"raysgd\.(core\.private_names|compat|testing|core\.state\.strict_reading|(air|train)\.constants)\b.*"
"""Modules for files and programs from before raysgd, and for what only raysgd has."""


def is_private(name: str) -> bool:
    return re.fullmatch(r"_\w*[a-z]\w*(?<!__)", name, re.IGNORECASE) is not None and not name.startswith("_raysgd")


@functools.cache
def modules() -> dict[str, list[ast.AST]]:
    """All nodes of the syntax of each module, by its name."""
    folders = (ROOT / "raysgd", ROOT / "operators")
    paths = [path for folder in folders for path in folder.rglob("*.py") if "raysgd/operators" not in path.as_posix()]
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return {
        name.removesuffix(".__init__"): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for name, path in zip(names, paths, strict=True)
    }


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """The names that a module gives to anything."""
    nodes = modules()[module]
    return frozenset(
        [each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        + [each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        + [each.arg for each in nodes if isinstance(each, ast.arg)]
        + [
            each.attr
            for each in nodes
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and last_part(each.value) in OURS
        ]
    )


def last_part(node: ast.AST) -> str:
    """Of `self._trainer` it is `_trainer`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    nodes = modules()[module]
    lines = [each for each in nodes if isinstance(each, ast.ImportFrom) and each.module]
    return frozenset(
        [alias.name for each in nodes if isinstance(each, ast.Import) for alias in each.names]
        + [f"{each.module}" for each in lines]
        + [f"{each.module}.{alias.name}" for each in lines for alias in each.names]
    )


def known_to(module: str) -> set[str]:
    """The private names of raysgd that a module may mean: of its package, and of what it imports."""
    depth = 3 if module.startswith(("raysgd.core.", "raysgd.trainer.")) else 2
    package = module.split(".")[:depth]
    seen = [each for each in modules() if each.split(".")[:depth] == package or each in imported_by(module)]
    parts = (part for each in (module, *imported_by(module)) if is_ours(each) for part in each.split("."))
    return {*parts, *(name for each in seen for name in defined_in(each))}


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("raysgd", "operators")


def named_in(module: str) -> Iterator[str]:
    """The private names that a module uses: attributes, strings that are names, and imports."""
    prose = {id(each.value) for each in modules()[module] if isinstance(each, ast.Expr | ast.FormattedValue)}
    prose |= {id(part) for each in modules()[module] if isinstance(each, ast.JoinedStr) for part in each.values}
    for each in modules()[module]:
        if isinstance(each, ast.Attribute) and last_part(each.value) not in OURS:
            yield each.attr
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in prose:
            yield from re.split("[.:]", each.value) if re.fullmatch(r"[\w.:]+", each.value) else ()
    for imported in imported_by(module):
        yield from () if is_ours(imported) else imported.split(".")


def borrowed_by(module: str) -> set[str]:
    if re.fullmatch(APART, module):
        return set()
    used = {name for name in named_in(module) if is_private(name)} - DOCUMENTED - GIVEN - KEYS
    return used - known_to(module)


def tabled_for(module: str) -> set[str]:
    rows = [row for row in TABLE if module.removeprefix("raysgd.") in row.used_in.split(", ")]
    return {name for row in rows for name in (*row.names, *re.split("[.:]", row.owner))}


def test_every_private_name_of_another_project_is_in_the_table() -> None:
    unlisted = {module: borrowed_by(module) - tabled_for(module) for module in modules()}
    assert {module: sorted(names) for module, names in unlisted.items() if names} == {}


def test_every_row_has_names_and_says_where_they_are_used_and_what_happens_without() -> None:
    sections = read_table(str(ROOT / "raysgd/core/private_names.py"))
    assert {key for title, row in sections.items() if title != "versions" for key in row} == {"used in", "without"}
    assert all(row.names and row.used_in and row.without for row in TABLE)
    assert len(TABLE) == len(sections) - 1


def test_every_name_of_the_table_is_used_where_it_says() -> None:
    for row in TABLE:
        for module in row.used_in.split(", "):
            path = ROOT / "raysgd" / module.replace(".", "/")
            text = next(each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()).read_text()
            unused = [name for name in row.names if not re.search(rf"\b{name}\b", text)]
            assert unused == [] or "," in row.used_in, f"{module} does without {unused}"
    assert sum(len(row.names) for row in TABLE) <= 80, "private names are debts: look for public ones"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.owner} {row.names[0]}")
def test_the_installed_versions_have_every_name(row: PrivateNames) -> None:
    if row.package in ("torch", "ray"):
        importlib.import_module(row.package)
    is_tested = row.package in TESTED and util.find_spec(row.package) is not None
    if is_tested and Version(metadata.version(row.package)) < Version(TESTED[row.package]):
        pytest.skip("an older version, in which some names are still to come")
    assert missing_names(row) == []


def test_a_name_that_is_gone_is_missed() -> None:
    assert missing_names(PrivateNames("torch.optim.optimizer:Optimizer", ("_gone", "step"), "", "")) == ["_gone"]
    assert missing_names(PrivateNames("json.decoder", ("_gone",), "", "")) == ["_gone"]
    assert missing_names(PrivateNames("not_installed.part:Thing", ("_gone",), "", "")) == []


def test_errors_name_versions_that_the_tests_run_with() -> None:
    pinned = (ROOT / "constraints-dev.txt").read_text()
    for package, version in TESTED.items():
        assert package == "horovod" or f"{package}=={version}" in pinned


# ------------------------------------------------------------------------------------------------ each is taken away

TAKEN: set[str] = set()
"""The names that tests take away."""
WRITTEN = {"_lightning_optimizers", "_opt_called", "_results", "hooked"}
"""Names that raysgd gives to objects of others, which do what the table says where they find none."""


def without(*names: str) -> Callable[[Any], Any]:
    """Mark a test that takes these names away, one after the other."""
    TAKEN.update(names)
    return pytest.mark.parametrize("name", names)


def gone(name: str, package: str) -> Any:
    """Expect the error that says which version has a name."""
    return pytest.raises(ImportError, match=rf"`{package}` .* no longer has `{name}`.*pip install \"{package}<=\d")


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


def test_every_name_is_taken_away_by_a_test() -> None:
    assert sorted({name for row in TABLE for name in row.names} - TAKEN - WRITTEN) == []


@without("require_forward_param_sync", "require_backward_grad_sync", "parameters_to_ignore", "process_group")
def test_no_model_is_wrapped_without(name: str, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            delattr(self, name)

    monkeypatch.setattr(strategy, "DistributedDataParallel", Later)
    with gone(name, "torch"):
        strategy.DDP().wrap(torch.nn.Linear(2, 1), None, {})


@without("reducer", "_rebuild_buckets")
def test_buckets_are_left_to_the_forward_pass_without(name: str, process_group: None) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model.reducer = None if name == "reducer" else object()
    global_steps._rebuild_buckets(model)


@without("allgather", "_allgather_base")
def test_sizes_are_compared_in_other_ways_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.ProcessGroup, name)
    before = dict(vars(dist.ProcessGroup))
    with advice.comparing_sizes(lambda: False):
        assert vars(dist.ProcessGroup) != before
    assert dict(vars(dist.ProcessGroup)) == before


def test_sizes_are_not_left_uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in advice._NAMES:
        monkeypatch.delattr(dist.ProcessGroup, name, raising=False)  # some are new
    with gone("allgather", "torch"), advice.comparing_sizes(lambda: False):
        raise AssertionError("nothing would compare them")


@without("_get_sequence_number_for_group")
def test_a_step_is_copied_whole_without(name: str, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    steps = undo.Undo([model], [optimizer], mode="learn")

    def take_step() -> bool:
        steps.open_call()
        record = OpenStep()
        steps.begin_step(record, nullcontext())
        record.note_step(optimizer)
        steps.see_return(record)
        return steps.mode == "all"

    assert not take_step()
    monkeypatch.delattr(dist.ProcessGroup, name)
    assert take_step()


@without("_foreach_copy_")
def test_nothing_is_copied_for_undo_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, name)
    with gone(name, "torch"):
        undo.Undo([], [], mode="all").open_call()


@without("_buffers")
def test_no_batch_may_be_undone_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            del vars(self)[name]

    monkeypatch.setattr(torch.nn, "Module", Later)
    with gone(name, "torch"):
        undo.Undo([], [], mode="all").open_call()


@without("_version")
def test_no_model_gets_its_numbers_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(2, 1)
    monkeypatch.setattr(torch, "Tensor", type("Tensor", (), {"__module__": "torch"}))
    with gone(name, "torch"):
        models._reset(layer, [])
    with gone(name, "torch"):
        remade.RemadeParameters([layer], object, num_models=1)


@without("_version")
def test_labels_are_counted_on_the_device_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, is_tensor = torch.zeros(2, dtype=torch.long), torch.is_tensor
    copy, calls, found = target.to("meta"), criteria.LossCalls(), list[criteria.LossCall]()
    later = type("Later", (type,), {"__instancecheck__": lambda cls, value: is_tensor(value)})
    with monkeypatch.context() as patched:
        patched.setattr(torch, "Tensor", later("Tensor", (), {}))
        assert not hasattr(torch.Tensor, name)
        calls.note_copy(target, copy)
    criterion = torch.nn.CrossEntropyLoss()
    with calls.on(criterion, found.append):
        calls.call(criterion, torch.zeros(2, 3, device="meta"), copy)
    assert found[0].amount.device.type == "meta"


@without("_reset_parameters")
def test_a_layer_that_is_not_reset_is_refused_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.MultiheadAttention(2, 1, device="meta")
    monkeypatch.delattr(torch.nn.MultiheadAttention, name)
    with pytest.raises(InvalidRegistrationError, match="because `MultiheadAttention` has no `reset_parameters`"):
        models.fill(layer, torch.device("cpu"))


@without("_metadata", "_extra_state")
def test_a_checkpoint_loads_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(torch.nn.Linear):
        count = 3

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    if name == "_extra_state":
        monkeypatch.setattr(torch.nn.modules.module, "_EXTRA_STATE_KEY_SUFFIX", "_other_state")
    model, other = Counts(2, 1), Counts(2, 1)
    state, other.count = dict(model.state_dict()), 0  # a dict has no `_metadata`
    loading.check_model(other, state)
    loading.load_model(other, loading.with_names_of(other, loading.with_plain_names(state)))
    assert other.count == 3
    assert torch.equal(other.weight, model.weight)


@without("_orig_mod")
def test_the_state_of_a_compiled_model_is_refused_by_others_without(name: str) -> None:
    compiled = torch.nn.ModuleDict({"_inner": torch.nn.Linear(2, 1)})
    with pytest.raises(ValueError, match="does not match"):
        loading.check_model(torch.nn.Linear(2, 1), loading.with_plain_names(compiled.state_dict()))


@without("_compiled_call_impl")
def test_a_criterion_takes_hooks_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.Module, name)
    assert criteria._takes_hooks(torch.nn.MSELoss())


@without("_last_lr")
def test_a_scheduler_follows_other_rates_without(name: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    delattr(scheduler, name)
    optimizer.param_groups[0].update(lr=0.5, initial_lr=0.5)
    hyperparameters._follow(scheduler)
    assert scheduler.base_lrs == [0.5]
    assert not hasattr(scheduler, name)


@without("_get_iterator")
def test_loaders_are_divided_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DataLoader, name)
    assert not sampling._has_own_iteration(DataLoader([1]))


@without("_dynamo", "_initializing")
def test_the_compiler_is_left_to_torch_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    if name == "_dynamo":
        monkeypatch.setattr(util, "find_spec", lambda _: None)
    else:
        monkeypatch.delattr(torch.__spec__, name)
    before = list(sys.meta_path)
    _compiler.defer_compiler()
    assert sys.meta_path == before
    assert "torch._dynamo" not in sys.modules


@without("__dynamo_disable")
def test_a_function_is_disabled_when_the_compiler_comes_without(name: str) -> None:
    def function() -> str:
        return "enabled"

    early = _compiler._DeferredImport(ModuleSpec("torch._dynamo", None)).disable(function)
    assert early() == "enabled"
    early.renew(SimpleNamespace(disable=lambda _: lambda: "disabled"))
    assert early() == "disabled"
    assert not hasattr(function, name)


@without("_utils")
def test_an_error_that_is_passed_on_may_be_a_lost_connection_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError) as caught:
        torch._utils.ExceptionWrapper((RuntimeError, error, None)).reraise()
    assert not is_connection_error(caught.value)
    monkeypatch.delitem(sys.modules, "torch._utils")
    assert is_connection_error(caught.value)


@without("_current_graph_task_id", "_execution_engine", "_handles")
@RunIf(modules=["horovod.torch"])
def test_horovod_trains_nothing_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "_current_graph_task_id":
        monkeypatch.delattr(torch._C, name)
    if name == "_execution_engine":
        monkeypatch.delattr(torch.autograd.Variable, name)
    connection = HorovodConnection()
    connection.join(meeting(connection.open_endpoint("127.0.0.1")), World(0, 1))
    try:
        with gone(name, "horovod" if name == "_handles" else "torch"):
            parallel = HorovodParallel(world_size=1)
            optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
            wrapped = parallel._hvd.DistributedOptimizer(optimizer)
            del wrapped._handles
            monkeypatch.setattr(parallel, "_hvd", SimpleNamespace(DistributedOptimizer=lambda *_, **__: wrapped))
            parallel.wrap_optimizer(optimizer)
    finally:
        connection.leave()


@without("_active_collector", "_CAN_RECORD_REGISTRY", "_can_record_outputs")
def test_a_model_is_packed_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, models._CAPTURING, ModuleType(models._CAPTURING))
    model = torch.nn.Linear(2, 1)
    assert models.unpacked(models.packed(model)) is model


@without("_ex_iterable", "_formatting")
def test_a_dataset_is_one_shard_with_rows_one_by_one_without(name: str) -> None:
    parts = {"_ex_iterable": SimpleNamespace(iter_arrow=None), "_formatting": None, "n_shards": 4}
    del parts[name]
    stream: Any = object.__new__(HuggingFaceStream)
    stream._dataset = SimpleNamespace(**parts)
    assert stream._num_shards == 1
    assert stream._formatter is None


@without("_computed", "_forward_cache", "_to_sync", "_update_count", "_reductions")
@RunIf(modules=["torchmetrics"])
def test_no_metric_is_reported_without(name: str) -> None:
    metric = importlib.import_module("torchmetrics").SumMetric()
    delattr(metric, name)
    with gone(name, "torchmetrics"):
        metric_objects.capture(metric)


@without("_flatten_layers")
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_no_keras_model_is_registered_without(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip(package)
    model = keras.Sequential([keras.layers.Dense(1)])
    assert len(registration.layers_in(model)) == 2
    take_from_classes(model, name, monkeypatch)
    with gone(name, package):
        registration.layers_in(model)


def take_from_classes(instance: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in type(instance).__mro__:
        if name in vars(each):
            monkeypatch.delattr(each, name)


def compiled_model(package: str) -> Any:
    keras = pytest.importorskip(package)
    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    return model


@without("get_global_attribute")
def test_keras_counts_on_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")

    def named() -> str:
        registration.begin_names()
        return str(keras.metrics.AUC().name)

    assert named() == named()
    monkeypatch.delattr("keras.src.backend.common.global_state." + name)
    registration.begin_names()


@without("_compile_config")
def test_xla_is_switched_off_instead_of_refused_without(name: str) -> None:
    model, synchronizer = compiled_model("keras"), keras_sync.Synchronizer(World(0, 1), num_workers=2)
    with pytest.raises(IncompatibleModelError, match="jit_compile"):
        synchronizer.watch_model(model)
    delattr(model, name)
    synchronizer.watch_model(model)
    assert model.jit_compile is False


@without("_steps_per_execution")
def test_no_model_of_tf_keras_is_fitted_without(name: str) -> None:
    model = compiled_model("tf_keras")
    assert registration.steps_per_execution(model) == 1
    delattr(model, name)
    with gone(name, "tf_keras"):
        registration.steps_per_execution(model)


@without("_trainable_variables")
def test_an_optimizer_asks_for_variables_without(name: str) -> None:
    keras = pytest.importorskip("keras")
    optimizer = keras.optimizers.SGD()
    keras_sync.Synchronizer(World(0, 1), num_workers=2).watch(optimizer)
    optimizer.build([keras.Variable([1.0])])
    delattr(optimizer, name)
    with gone(name, "keras"):
        optimizer.apply([1.0])


@without("_create_all_weights")
def test_slots_of_a_former_optimizer_are_made_in_its_first_step_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = pytest.importorskip("tf_keras").optimizers.legacy.Adam()
    take_from_classes(optimizer, name, monkeypatch)
    registration.build_optimizer(optimizer, [])
    assert not registration.variables_of_optimizer(optimizer)


@without("_loss_scale")
def test_no_state_of_a_scaled_optimizer_is_read_without(name: str) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD())
    assert [variable.numpy() for variable in registration.variables_of_optimizer(optimizer)[:2]] == [2**15, 0]
    delattr(optimizer, name)
    with gone(name, "tf_keras"):
        registration.variables_of_optimizer(optimizer)


SLOTS = {name: kind for kind, names in checkpoint_file.FORMER_SLOTS.items() for name in names if name.startswith("_")}


@without(*SLOTS)
def test_former_weights_are_left_out_without(name: str) -> None:
    keras = pytest.importorskip("keras")
    options = {"RMSprop": {"momentum": 0.5, "centered": True}, "Adam": {"amsgrad": True}}
    optimizer = getattr(keras.optimizers, SLOTS[name])(**options.get(SLOTS[name], {}))
    optimizer.build([keras.Variable([1.0])])
    weights = [np.zeros(()), *[np.zeros(1)] * (len(optimizer.variables) - 2)]
    assert checkpoint_file.former_slots(optimizer, weights) is not None
    delattr(optimizer, name)
    assert checkpoint_file.former_slots(optimizer, weights) is None


@without("_inputs")
def test_no_dataset_is_looked_into_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pytest.importorskip("tensorflow").data.Dataset.range(3)
    take_from_classes(dataset, name, monkeypatch)
    with gone(name, "tensorflow"):
        datasets.is_shuffled(dataset)


@without("actors", "workers", "_actor_id")
def test_ray_says_of_no_process_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "_actor_id":
        monkeypatch.delattr(importlib.import_module("ray._private.state"), name)
        assert not ray_cluster.is_alive("maker", None)
    if name != "workers":
        identity = SimpleNamespace(hex=lambda: "01")
        actor = SimpleNamespace() if name == "_actor_id" else SimpleNamespace(_actor_id=identity)
        assert Platform().find_process(SimpleNamespace(actor=actor)) is None  # type: ignore[arg-type]


@without("available_resources_per_node")
@pytest.mark.parametrize(("num_nodes", "free"), [(1, {"0": {"CPU": 3.0}}), (2, {})])
def test_what_is_free_is_known_of_one_node_without(
    name: str, num_nodes: int, free: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module("ray._private.state"), name)
    nodes = [{"NodeID": str(number), "Alive": True} for number in range(num_nodes)]
    ray = SimpleNamespace(nodes=lambda: nodes, available_resources=lambda: {"CPU": 3.0})
    monkeypatch.setattr(ray_cluster, "untyped_ray", lambda: ray)
    assert ray_cluster._free_by_node() == free


@without("get_draining_nodes")
def test_no_node_goes_away_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module("ray._private.state").GlobalState, name)
    was_connected = ray.is_initialized()
    assert ray_cluster.drain_deadlines() == {}
    assert was_connected == ray.is_initialized(), "the question started Ray"


@RunIf(modules=["ray._private.authentication"])
@without("print_to_stdstream", "_global_node", "maybe_enable_token_auth_if_token_available")
def test_ray_is_used_as_it_is_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "worker" if "enable" not in name else "authentication.authentication_token_setup"
    module = importlib.import_module(f"ray._private.{place}")
    monkeypatch.delattr(module, name)
    ray_cluster._quiet_ray() if name == "print_to_stdstream" else ray_cluster._use_token()
    assert not (name == "_global_node" and cluster._ends_with_program())
    assert not hasattr(module, name)


@without("_connect_or_shutdown_lock", "enable_auto_connect")
def test_background_calls_run_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"ray._private.{'worker' if 'lock' in name else 'auto_init_hook'}")
    monkeypatch.delattr(module, name)
    keep_threads_from_starting_ray()
    with delaying_shutdown():
        assert RayThreads().start(lambda: 1, "raysgd-test").result(60) == 1
    assert not hasattr(module, name)


@without("_session")
def test_reports_of_ray_tune_are_not_those_of_the_run_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ray.train._internal.session")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    facts = SimpleNamespace(id="1", name="trial", experiment_name="run")
    session: Any = SimpleNamespace(world=World(0, size=1), facts=facts)
    with fit_session._seen_by_ray(session):
        assert not hasattr(module, name)
    module._session = None  # type: ignore[attr-defined]
    with fit_session._seen_by_ray(session):
        assert module._session.world_rank == 0  # type: ignore[attr-defined]
    assert module._session is None  # type: ignore[attr-defined]


@without("_in_tune_session")
def test_a_trial_is_not_seen_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ray.tune.trainable.trainable_fn_utils")
    tune = ModuleType("ray.tune")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, tune.__name__, tune)
    assert tune_here() is None
    setattr(module, name, lambda: True)
    assert tune_here() is tune
