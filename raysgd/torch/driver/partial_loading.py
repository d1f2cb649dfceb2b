"""Loads a part of a file, such as the weights alone, and says what did not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from raysgd import _arguments as checks
from raysgd.engine.snapshots import Snapshot
from raysgd.torch.checkpoints import checkpoint_file, divided_folder, divided_state, weights_file
from raysgd.torch.hosting.replica_state import CRITERION, as_in_file
from raysgd.torch.objects.loading import with_plain_names
from raysgd.worker.state.replica_state import RESUME

PARTS = ("models", "criterion", "optimizers", "schedulers", "precision", "operator", "progress")
"""What a file is made of, for `load(parts=...)`."""

_WEIGHTS = ("models",)
_NOT_PRECISION = frozenset({"epoch", "operator", "models", "optimizers", "schedulers", CRITERION, RESUME})

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelReport:
    """The part of a file that a model took.

    Attributes:
        missing: Names that the file lacks. They keep their values.
        unexpected: Names that the model does not have.
        mismatched: Names whose shapes differ: the shape in the file, and that of the model. They keep their values.
        num_loaded: How many names were loaded.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    num_loaded: int = 0

    def __str__(self) -> str:
        shapes = [f"{name}: {saved} in the file, {own} in the model" for name, (saved, own) in self.mismatched.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "other shapes": shapes}
        told = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        return "; ".join([f"{self.num_loaded} loaded", *told])


@dataclass(frozen=True)
class LoadReport:
    """The part of a file that `load` took.

    Attributes:
        parts: The parts that were loaded.
        models: One report for each model; empty if models were not loaded.
    """

    parts: tuple[str, ...]
    models: tuple[ModelReport, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that the file lacks, of all models."""
        return tuple(name for model in self.models for name in model.missing)

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Names in the file that no model has."""
        return tuple(name for model in self.models for name in model.unexpected)

    @property
    def mismatched(self) -> dict[str, tuple[Shape, Shape]]:
        """Names whose shapes differ, with the shapes in the file and in the model, of all models."""
        return {name: shapes for model in self.models for name, shapes in model.mismatched.items()}

    @property
    def is_complete(self) -> bool:
        """True if every name was loaded."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        return "\n".join([f"loaded {', '.join(self.parts)}", *(f"model {i}: {m}" for i, m in enumerate(self.models))])


def checked_parts(parts: Any, strict: Any) -> tuple[str, ...] | None:
    """The parts to load, in their order; None for the whole file.

    Raises:
        TypeError: `parts` is no sequence of names.
        ValueError: There is no such part.
    """
    checks.refuse_text(strict=strict)
    if parts is None:
        return None if strict else _WEIGHTS
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise TypeError(f'`parts={parts!r}`: need a tuple of names, such as `parts=("models",)`.')
    names = list(parts)
    for name in names:
        if name not in PARTS:
            guess = checks.did_you_mean(str(name), PARTS)
            raise ValueError(f"`parts` has {name!r}.{guess} There are {', '.join(f'`{each}`' for each in PARTS)}.")
    if not names:
        raise ValueError("`parts=()`: name at least one part, or leave it out to load all of them.")
    return tuple(name for name in PARTS if name in names)


def read(path: str, name: str, weights_only: bool, held: ExitStack) -> dict[str, Any]:
    """Returns the content of a file of either format, or of a folder; tensors may be views of the open file."""
    if divided_folder.is_folder(path):
        return divided_folder.opened(path, weights_only).read_whole()
    if weights_file.is_weights_file(path):
        return {"models": weights_file.read(path, name)}
    return held.enter_context(checkpoint_file.mapped(path, weights_only=weights_only, name=name)).state


def merged(
    snapshot: Snapshot, saved: Mapping[str, Any], parts: tuple[str, ...] | None, strict: bool
) -> tuple[dict[str, Any], LoadReport]:
    """The present state with parts of a saved one in it, and what these were.

    Args:
        snapshot: The present state.
        saved: What is in the file.
        parts: What to take of it; None for the models.
        strict: Whether all weights have to fit. Checked where the state is loaded.

    Raises:
        KeyError: The file lacks a part.
        ValueError: It holds another number of models.
    """
    state: dict[str, Any] = as_in_file(divided_state.whole(snapshot.shared_state, copy=True))
    reports: tuple[ModelReport, ...] = ()
    parts = parts or _WEIGHTS
    for part in parts:
        if part == "models":
            reports = _take_models(state["models"], _part(saved, part), strict)
        else:
            state.update(_taken(part, saved))
    return state, LoadReport(parts, reports)


def _taken(part: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    if part == "progress":
        resume = {RESUME: saved[RESUME]} if RESUME in saved else {}
        return {"epoch": _part(saved, "epoch"), **resume}
    if part == "precision":
        return {name: value for name, value in saved.items() if name not in _NOT_PRECISION}
    return {part: _part(saved, part)}


def _part(saved: Mapping[str, Any], part: str) -> Any:
    if part not in saved:
        raise KeyError(f"The file has no {part!r}; it has {sorted(map(str, saved))}. Nothing was loaded.")
    return saved[part]


def _take_models(own: list[Any], saved: Any, strict: bool) -> tuple[ModelReport, ...]:
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        found = len(saved) if isinstance(saved, list | tuple) else f"a `{type(saved).__name__}` instead of"
        raise ValueError(f"The file holds {found} models, but the operator registered {len(own)}. Nothing was loaded.")
    reports = []
    for index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        theirs = with_plain_names(theirs)
        full = weights_file.with_tied(theirs, mine) if isinstance(theirs, Mapping) else theirs
        if strict:
            own[index], report = full, ModelReport(num_loaded=len(full))
        else:
            report = _take_what_fits(mine, full)
        reports.append(report)
    return tuple(reports)


def _take_what_fits(own: Any, saved: Mapping[str, Any]) -> ModelReport:
    """Replaces in a model's state what is there in another one with the same shape."""
    mismatched = {
        name: (_shape(saved[name]), _shape(value))
        for name, value in own.items()
        if name in saved and _shape(saved[name]) != _shape(value)
    }
    fitting = [name for name in own if name in saved and name not in mismatched]
    missing = tuple(name for name in own if name not in saved)
    unexpected = tuple(str(name) for name in saved if name not in own)
    own.update({name: saved[name] for name in fitting})
    return ModelReport(missing, unexpected, mismatched, len(fitting))


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
