"""A group without connections: two ranks that always have the same numbers."""

from __future__ import annotations

from raysgd.connections.group import Array, Group
from raysgd.engine.shared.types import World


class TwoAlike(Group):
    """Rank 0 of two; what the other one sends is what this one has."""

    def __init__(self) -> None:
        super().__init__(World(0, 2))

    def add_up(self, numbers: Array) -> None:
        numbers *= 2

    def gather(self, numbers: Array) -> list[Array]:
        return [numbers, numbers]

    def from_first(self, numbers: Array) -> None:
        """They have them already."""
