"""The table of old and new names: everything on its right side is there.

Covers `raysgd.train`, which is a list of names.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import warnings
from collections.abc import Iterator

import pytest

from raysgd.compat import paths as _paths
from raysgd.compat.names import MOVED
from raysgd.compat.paths import RAY_TRAIN, Paths, gone, renamed, table
from raysgd.core.tables import read_table
from tests.helpers.run_if import RunIf

VENDORS = {
    "comet": "comet_ml",
    "keras": "tensorflow",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "horovod": "horovod",
    "lightning": "lightning",
    "transformers": "transformers",
}
ROWS = [(old, new, names) for group in ("sgd", "train") for old, new, names in table(group)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("old", "new", "names"), ROWS, ids=[old for old, _, _ in ROWS])
def test_everything_that_has_a_successor_is_there(
    old: str, new: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning leaves it once it is imported
    package = VENDORS.get(new.rpartition(".")[2])
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    module = importlib.import_module(new)
    has_horovod = importlib.util.find_spec("horovod") is not None
    expected = [name for name in names.split() if has_horovod or not name.startswith("Horovod")]
    assert [name for name in expected if not hasattr(module, name)] == []


@pytest.mark.parametrize("old", renamed())
def test_what_was_renamed_is_there(old: str) -> None:
    module, _, name = renamed()[old].rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_a_row_is_a_module_with_its_names_or_a_name_or_a_reason() -> None:
    rows = read_table(_paths.__file__)
    modules = [
        row for title in ("sgd", "beside sgd", "inside Ray", "train", "kept by Ray") for row in rows[title].items()
    ]
    names = [row for title in ("renamed", "renamed train") for row in rows[title].items()]
    assert [row for row in modules if not re.fullmatch(r"[\w.]+ [\w.]+(: \w+( \w+)*)?", " ".join(row))] == []
    assert [row for row in names if not re.fullmatch(r"[\w.]+ [\w.]+", " ".join(row))] == []
    assert len(rows) == 9


def test_each_reason_that_several_names_share_is_there_and_is_used() -> None:
    rows = read_table(_paths.__file__)
    assert {reason for reason in rows["gone"].values() if re.fullmatch(r"\(.*\)", reason)} == rows["reasons"].keys()
    assert _paths._OF_RAY in rows["reasons"]


def test_a_name_is_listed_once() -> None:
    listed = {f"{old}.{name}" for old, _, names in ROWS for name in names.split()}
    assert listed & {*gone(), *renamed()} == set()
    assert {old for old, _, _ in ROWS} & set(gone()) == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ray.util.sgd.TorchTrainer", "raysgd.TorchTrainer"),
        ("ray.util.sgd.torch", "raysgd.torch"),
        ("ray.util.sgd.torch.TorchTrainer.as_trainable", "raysgd.torch.TorchTrainer.as_trainable"),
        ("ray.util.sgd.PyTorchTrainer", "raysgd.TorchTrainer"),
        ("ray.util.sgd.v2.backends.torch.TorchConfig", "raysgd.train.torch.TorchConfig"),
        ("ray.train.Trainer", "raysgd.train.Trainer"),
        ("ray.air.session.report", "raysgd.air.session.report"),
        ("ray.train.torch.config.TorchConfig.backend_cls", "raysgd.train.torch.TorchConfig.backend_cls"),
        ("ray.train._checkpoint.Checkpoint", "raysgd.train.Checkpoint"),
        ("ray.train.tensorflow.TensorflowCheckpoint.from_h5", "raysgd.train.tensorflow.TensorflowCheckpoint.from_h5"),
    ],
)
def test_a_dotted_name_leads_to_a_dotted_name(old: str, new: str) -> None:
    place = Paths(ray_train=True).find(old)
    assert place is not None
    assert (place.old, place.new, place.reason) == (old, new, "")
    assert new == place.module or new.startswith(f"{place.module}.")


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        ("ray.util.sgd.torch.torch_runner.TorchRunner", "internal"),
        ("ray.util.sgd.torch.worker_group", "internal"),
        ("ray.util.sgd.torch.Nothing", "of `ray.util.sgd.torch` raysgd has `BaseTorchTrainable`"),
        ("ray.train.tensorflow.tensorflow_checkpoint.TensorflowCheckpoint.from_saved_model", "`from_h5`"),
        ("ray.experimental.sgd.pytorch.PyTorchTrainable", "`TorchTrainer.as_trainable(...)`"),
        ("ray.experimental.sgd.sgd.DistributedSGD", "`TFTrainer`"),
        ("ray.util.iter.from_actors", "from_iterators"),
        ("ray.train.tensorflow.TensorflowCheckpoint.from_saved_model", "`from_h5`"),
    ],
)
def test_a_name_that_is_gone_has_a_reason(old: str, reason: str) -> None:
    place = Paths(ray_train=True).find(old)
    assert place is not None
    assert place.new is None
    assert reason in place.reason


@pytest.mark.parametrize(
    "name", ["ray", "ray.init", "ray.util", "ray.train.Trainer", "ray.air.session", "raysgd.torch"]
)
def test_the_names_of_others_are_not_in_the_table(name: str) -> None:
    assert Paths().find(name) is None


def public_names_of_ray_train() -> Iterator[str]:
    """What the modules of today's `ray.train` list as theirs, of those whose packages are installed."""
    import ray.train

    below = [each.name for each in pkgutil.iter_modules(ray.train.__path__) if not each.name.startswith("_")]
    for module in ("ray.train", *(f"ray.train.{name}" for name in below), "ray.train.huggingface.transformers"):
        try:
            names = getattr(importlib.import_module(module), "__all__", ())
        except ImportError:
            continue
        yield from (f"{module}.{name}" for name in names)


@RunIf(modules=["pandas", "pyarrow", "pydantic"])
def test_every_public_name_of_todays_ray_train_is_here_or_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning leaves it once it is imported

    paths = Paths(ray_train=True)
    names = list(public_names_of_ray_train())
    places = {name: paths.find(name) for name in names}
    missing = [name for name, place in places.items() if place is None or not place.is_listed]
    if ray.__version__.startswith(f"{RAY_TRAIN}."):
        assert len(names) > 40
        assert missing == []
    elif missing:
        warnings.warn(f"Ray {ray.__version__} has names of `ray.train` that no table has: {missing}", stacklevel=1)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MOVED.items() for name in names])
def test_a_name_that_moved_is_found_where_it_was(module: str, name: str) -> None:
    place, _, name_there = MOVED[module][name].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert found is vars(importlib.import_module(place))[name_there or name]
    assert name in dir(importlib.import_module(module))
