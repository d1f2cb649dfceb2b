"""The kinds of trainers that there are sequences for."""

from __future__ import annotations

import importlib

from tests.helpers.forked import FOR_TENSORFLOW, FOR_TORCH
from tests.sequences.subjects import Subject

MODULES = {
    "torch_trainers": (
        "stock",
        "own-batch",
        "two-optimizers",
        "own-loop",
        "lightning",
        "collate",
        "sampler",
        "stream",
        "dataset",
        "dataset-collate",
        "dataset-stream",
    ),
    "functions": ("functions",),
    "ends": ("ends",),
    "detached_trainers": ("detached", "detached-collate"),
    "keras_trainers": ("keras-operator", "keras-creators"),
}
KINDS = {kind: module for module, kinds in MODULES.items() for kind in kinds}


def subject_class(kind: str) -> type[Subject]:
    """Return what sequences of a kind happen to."""
    module = importlib.import_module(f"tests.sequences.{KINDS[kind]}")
    found: type[Subject] = module.SUBJECTS[kind]
    return found


def preloaded(kind: str) -> tuple[str, ...]:
    """Return what workers of a kind import first."""
    return FOR_TENSORFLOW if KINDS[kind] == "keras_trainers" else FOR_TORCH
