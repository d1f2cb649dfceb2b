"""`Detachable`: with `detached`, the class of a trainer returns the handle of one that outlives this program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from raysgd.detached.protocol import Detached

Options = Mapping[str, Any]


class Detachable:
    """Base class of all trainers.

    Attributes:
        _outlives_its_process: Returns True if the workers of a detached trainer with these options continue when the
            trainer's process dies.
        _settle: Returns the options with defaults that depend on the cluster, once Ray is connected.
    """

    _outlives_its_process: ClassVar[Callable[[Options], bool]] = staticmethod(lambda options: False)
    _settle: ClassVar[Callable[[Options], Options]] = staticmethod(lambda options: options)

    if not TYPE_CHECKING:  # type checkers should see only `__init__` with its typed arguments

        def __new__(cls, *args: Any, detached: str | Detached | None = None, **kwargs: Any) -> Any:
            """Create a trainer. With `detached`, create a trainer that outlives this program, and return a handle."""
            if detached is None:
                return super().__new__(cls)
            from raysgd.detached.cluster import start

            return start(cls, detached, args, kwargs)
