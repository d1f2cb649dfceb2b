"""The reference lists every public name: what a program can import from the doors, by their `__all__`."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ENTRY = re.compile(r"^::: (\S+)(\n    options:\n      members: true)?", re.MULTILINE)
DOORS = (
    "raysgd",
    "raysgd.air",
    "raysgd.callbacks",
    "raysgd.compat",
    "raysgd.data",
    "raysgd.operators",
    "raysgd.storage",
    "raysgd.testing",
    "raysgd.tf",
    "raysgd.torch",
    "raysgd.torch.building_blocks",
    "raysgd.train",
    "raysgd.train.callbacks",
    "raysgd.train.collective",
    "raysgd.train.huggingface.transformers",
    "raysgd.train.lightning",
    "raysgd.train.tensorflow",
    "raysgd.train.torch",
    "raysgd.tune",
    "raysgd.utils",
)
HOROVOD = ["raysgd", "train", "horovod"]
"""Cannot be imported without Horovod, which `make test` does not install."""

OLD = {
    "PyTorchTrainer": "`TorchTrainer` under the name of its first version",
    "TRAIN_DATASET_KEY": "the string 'train'",
    "BaseTorchTrainable": "what `as_trainable` returns",
    "TFTrainable": "what `as_trainable` returns",
    "TorchBackend": "for subclasses of backends",
    "TrainWorkerGroup": "for subclasses of backends",
    "__version__": "no object",
}
"""Names that are for old programs, or say all by themselves."""


def resolved(name: str) -> Any:
    """The object of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no `{name}`")


def listed() -> list[Any]:
    """The objects of the entries, and the members of modules that are listed whole."""
    entries = [entry for page in (DOCS / "reference").glob("*.md") for entry in ENTRY.findall(page.read_text("utf-8"))]
    entries = [entry for entry in entries if entry[0].split(".")[:3] != HOROVOD or importlib.util.find_spec("horovod")]
    objects = [resolved(name) for name, _ in entries]
    whole = [resolved(name) for name, has_members in entries if has_members]
    return objects + [value for module in whole for value in vars(module).values()]


@pytest.fixture(scope="module")
def entries() -> list[Any]:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    return listed()


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_has_an_entry(door: str, entries: list[Any]) -> None:
    module = importlib.import_module(door)
    own = {name: getattr(module, name) for name in module.__all__ if name not in OLD}
    own = {name: value for name, value in own.items() if not str(getattr(value, "__module__", "")).startswith("ray.")}
    missing = [name for name, value in own.items() if not any(value is each for each in entries)]
    assert missing == [], f"add `::: {door}.{missing[0]}` to a page in docs/reference"


def test_old_names_are_public_ones() -> None:
    public = {name for door in DOORS for name in importlib.import_module(door).__all__}
    assert set(OLD) <= public


def test_an_entry_that_names_nothing_is_found() -> None:
    with pytest.raises(AttributeError):
        resolved("raysgd.callbacks.Telepathy")
