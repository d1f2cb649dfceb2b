"""`Detachable`: with `detached`, the class of a trainer returns the handle of one that outlives this program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.detached.protocol import Detached


class Detachable:
    """Base class of all trainers."""

    @staticmethod
    def _outlives_its_process(options: Mapping[str, Any]) -> bool:
        """Return True if the workers of a detached trainer with these options continue when its process dies."""
        return False

    @staticmethod
    def _settle(options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options with defaults that depend on the cluster, once Ray is connected."""
        return options

    if not TYPE_CHECKING:  # type checkers should see only `__init__` with its typed arguments

        def __new__(cls, *args: Any, detached: str | Detached | None = None, **kwargs: Any) -> Any:
            """Create a trainer. With `detached`, create a trainer that outlives this program, and return a handle."""
            if detached is None:
                return super().__new__(cls)
            from raysgd.detached.cluster import start

            return start(cls, detached, args, kwargs)
