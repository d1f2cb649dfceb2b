"""Makes the replicas of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysgd.engine.shared.types import World


@dataclass
class ReplicaMaker:
    """Makes the replicas of a trainer, now and later, from the settings that it has at the time.

    Attributes:
        runner_cls: Their class.
        settings: What they are made from.
    """

    runner_cls: Any
    settings: Any = None

    def __call__(self, world: World) -> Any:
        return self.runner_cls(self.settings, world)
