"""What `register` is given: one object or several, and handed back in the same container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RegisteredParts:
    """The objects of one kind, and the kind of container that they came in.

    Attributes:
        items: The objects.
        container: `tuple`, `list`, or None for a single object.
    """

    items: list[Any]
    container: type | None

    def mirror(self, items: Sequence[Any]) -> Any:
        """`items` in the container that the user used."""
        if self.container is None:
            return items[0]
        return tuple(items) if self.container is tuple else list(items)


def refuse_unknown(unknown: dict[str, Any], hint: str, allowed: str) -> None:
    """Refuses keywords that `register` does not have.

    Raises:
        TypeError: There are some.
    """
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise TypeError(f"`register` does not know {names}. {hint}Allowed are {allowed}.")
