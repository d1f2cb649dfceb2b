"""The door through which tests look inside a trainer: the only place in `tests/` that reaches for its private parts.

Look here only for what no user can see. Workers, events and throughput are in `trainer.status()` and
`trainer.worker_group`. A test that wants a part of the engine by itself makes one, as those in `tests/core/engine` do.
"""

from __future__ import annotations

from typing import Any

from raysgd.core.engine.controller import ElasticController


def controller_of(trainer: Any) -> ElasticController:
    """What keeps the trainer's workers alive: its history, its snapshots, its group."""
    controller: ElasticController = trainer._life.controller
    return controller
