"""The classes of programs that there are."""

from __future__ import annotations

import importlib

from tests.programs.parts import Kind

KINDS = ("counts", "schedulers", "lightning", "streams", "metrics")
MODULES = {
    "counts": "counts",
    "schedulers": "learning_rates",
    "lightning": "lightning_modules",
    "streams": "row_streams",
    "metrics": "own_metrics",
}


def kind_of(name: str) -> Kind:
    """Return a class of programs."""
    found: Kind = importlib.import_module(f"tests.programs.{MODULES[name]}").KIND
    return found
