"""The arguments of `register`: one object or several, handed back in the same container."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.exceptions import InvalidRegistrationError


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


def parts_of(
    name: str, given: Any, is_one: Callable[[Any], bool], what: str, *, may_be_empty: bool = False
) -> RegisteredParts:
    """One object or several of a kind.

    Args:
        name: The argument that they were passed as.
        given: What was passed.
        is_one: Whether an object is of that kind. It may be iterable as well.
        what: The kind, in words.
        may_be_empty: Whether a container of none will do.

    Raises:
        InvalidRegistrationError: Something in it is of another kind, or there is none.
    """
    if is_one(given):
        return RegisteredParts([given], None)
    is_single = not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping) or hasattr(given, "shape")
    items = [given] if is_single else list(given)
    strangers = [item for item in items if not is_one(item)]
    if strangers or not (items or may_be_empty):
        found = _found(strangers[0]) if strangers else "nothing"
        raise InvalidRegistrationError(f"`register({name}=...)` got {found}: pass {what}, or a list or tuple of them.")
    return RegisteredParts(items, tuple if isinstance(given, tuple) else list)


def _found(item: Any) -> str:
    if isinstance(item, type):
        return f"the class `{item.__name__}` instead of an object of it, `{item.__name__}(...)`"
    return f"`{type(item).__name__}`"
