"""Loads parts of a checkpoint or weights file, such as only the weights, and reports which weights did not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from raysgd.core import arguments as checks
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.text.printable import printable_lines
from raysgd.torch.checkpoints import checkpoint_file, divided_folder, divided_state, weights_file
from raysgd.torch.hosting.torch_state import CRITERION, REMADE
from raysgd.torch.objects.loading import with_plain_names
from raysgd.torch.objects.precision import STATE_KEYS
from raysgd.trainer.worker.state.replica_state import RESUME

PARTS = ("models", "criterion", "optimizers", "schedulers", "precision", "operator", "progress")
"""Names of the parts of a checkpoint that `load(parts=...)` accepts."""

_WEIGHTS = ("models",)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """Report of what `load` took from a file, and what did not fit.

    If the operator has several models, each weight's name starts with the model's index and a dot.

    Attributes:
        parts: Names of the parts that were loaded, such as "models".
        missing: Names of weights that the file lacks. These weights keep their values.
        unexpected: Names of weights in the file that the model lacks.
        mismatched: Names of weights whose shapes differ, with the shapes in the file and in the model. These weights
            keep their values.
        num_loaded: Number of the models' weights that were loaded, including buffers.
    """

    parts: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    num_loaded: int = 0

    @property
    def is_complete(self) -> bool:
        """True if no weight is missing, unexpected or mismatched. Also True if the models were not loaded."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name}: {saved} in the file, {own} in the model" for name, (saved, own) in self.mismatched.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "other shapes": shapes}
        told = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        return printable_lines("; ".join([f"loaded {', '.join(self.parts)}", f"{self.num_loaded} weights", *told]))


def checked_parts(parts: Any, strict: Any) -> tuple[str, ...] | None:
    """Check the arguments `parts` and `strict` of `load`. Return the parts to load; None for the entire file.

    Parts are returned in the order of `PARTS`. Without `parts`, `strict=False` loads only the models.

    Raises:
        TypeError: `parts` is not a sequence of names.
        ValueError: A name is unknown, or `parts` is empty.
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
            raise ValueError(f"`parts` has {name!r}.{guess} Available: {', '.join(f'`{each}`' for each in PARTS)}.")
    if not names:
        raise ValueError("`parts=()`: name at least one part, or omit `parts` to load all of them.")
    return tuple(name for name in PARTS if name in names)


def read(path: str, name: str, weights_only: bool, held: ExitStack) -> dict[str, Any]:
    """Read the state in a checkpoint file, a checkpoint folder or a weights file.

    Tensors may be memory-mapped from the file. They are then valid only while the file is open.

    Args:
        path: Path of the file or folder.
        name: Name of the file or folder to show in errors.
        weights_only: False to unpickle arbitrary objects.
        held: Exit stack to which the open file is added. Closing the stack closes the file.
    """
    if divided_folder.is_folder(path):
        return divided_folder.opened(path, weights_only).read_whole()
    if weights_file.is_weights_file(path):
        return weights_file.read(path, name)
    return held.enter_context(checkpoint_file.mapped(path, weights_only=weights_only, name=name))


def merged(
    snapshot: Snapshot, saved: Mapping[str, Any], parts: tuple[str, ...] | None, strict: bool
) -> tuple[dict[str, Any], LoadReport]:
    """Return the trainer's state with some parts replaced by those in a file, and a report of what did not fit.

    Args:
        snapshot: Current state of the trainer.
        saved: Content of the file.
        parts: Names of the parts to take from the file; None for only the models.
        strict: True to take all weights. If some do not fit the models, loading the returned state into the workers
            raises. False to take only the weights that fit.

    Raises:
        ValueError: The file lacks a part, has a different number of models, or a model in the file is not a dict.
    """
    state: dict[str, Any] = checkpoint_file.as_in_file(divided_state.whole(snapshot.shared_state, copy=True))
    parts = parts or _WEIGHTS
    report = LoadReport(parts)
    for part in parts:
        if part == "models":
            left_out = _names_left_out(state)
            report = _take_models(state["models"], _part(saved, part), strict, parts, left_out)
        else:
            state.update(_taken(part, saved))
        if (REMADE in state or REMADE in saved) and (part == CRITERION or (part == "models" and strict)):
            from raysgd.torch.objects.remade import with_record_of

            state = with_record_of(state, saved, REMADE, part)
    return state, report


def _names_left_out(state: Mapping[str, Any]) -> list[Collection[str]]:
    """Return, for each model, the names of frozen weights that `state` omits because `setup` recreates them."""
    parts = state[REMADE]["parts"] if REMADE in state else ()
    return [parts[index] if index < len(parts) else () for index in range(len(state["models"]))]


def _taken(part: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    if part == "progress":
        resume = {RESUME: saved[RESUME]} if RESUME in saved else {}
        return {"epoch": _part(saved, "epoch"), **resume}
    if part == "precision":
        return {name: saved[name] for name in STATE_KEYS if name in saved}
    return {part: _part(saved, part)}


def _part(saved: Mapping[str, Any], part: str) -> Any:
    if part not in saved:
        raise ValueError(f"The file has no {part!r}, so nothing was loaded. Available: {sorted(map(str, saved))}.")
    return saved[part]


def _take_models(
    own: list[Any], saved: Any, strict: bool, parts: tuple[str, ...], left_out: Sequence[Collection[str]]
) -> LoadReport:
    """Replace the models' state dicts in `own` with the saved ones. Without `strict`, replace only weights that fit.

    Return a report. With `strict`, the report lists no names, because weights that do not fit are detected later.

    Args:
        own: Current state dicts of the models, changed in place.
        saved: State dicts of the models from the file.
        strict: True to take all saved weights, even those that do not fit.
        parts: Names of the parts to list in the report.
        left_out: For each model, names of frozen weights that the current state omits because `setup` recreates them.
            If the file has these weights, the report does not list them as unexpected.
    """
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        found = len(saved) if isinstance(saved, list | tuple) else f"a `{type(saved).__name__}` instead of"
        raise ValueError(f"The file holds {found} models, but the operator registered {len(own)}. Nothing was loaded.")
    missing, unexpected, num_loaded = list[str](), list[str](), 0
    mismatched: dict[str, tuple[Shape, Shape]] = {}
    for index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        if not isinstance(theirs, Mapping):
            raise ValueError(
                f"Model {index} in the file is a `{type(theirs).__name__}`, not a dict. Nothing was loaded."
            )
        full = weights_file.with_tied(with_plain_names(theirs), mine)
        if strict:
            own[index] = full
            num_loaded += len(full)
            continue
        of_model, fitting = f"{index}." if len(own) > 1 else "", {}
        for name, value in mine.items():
            if name not in full:
                missing.append(f"{of_model}{name}")
            elif _shape(full[name]) != _shape(value):
                mismatched[f"{of_model}{name}"] = _shape(full[name]), _shape(value)
            else:
                fitting[name] = full[name]
        unexpected += [f"{of_model}{name}" for name in full if name not in mine and name not in left_out[index]]
        mine.update(fitting)
        num_loaded += len(fitting)
    return LoadReport(parts, tuple(missing), tuple(unexpected), mismatched, num_loaded)


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
