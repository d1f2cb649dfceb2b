"""Ray Tune: trainers as trials, and populations of trainers that stay alive.

What it guarantees: a trial starts workers of its own in what Tune reserved for it, reports what rank 0 reports, and
gives its checkpoints to Tune.
What it leaves to others: the search is Tune's. No other package of raysgd imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.tune.population import Exploration, Population

__all__ = ["Exploration", "Population"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Exploration": "raysgd.tune.population",
        "Population": "raysgd.tune.population",
    },
)
