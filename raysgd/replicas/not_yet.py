"""What stands for a method that is not there yet."""

from __future__ import annotations

from typing import NoReturn


class NotYet:
    """Stands for a method that people look for and that is not here yet; what uses it is told what there is instead."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"`{owner.__name__}.{self._name}` is not available yet. {self._instead}")
