"""`Detachable`: with `detached`, the class of a trainer returns the handle of one that outlives this program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.core.cluster.keeper import Keeper
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

    def _kept_by(self, keeper: Keeper, left_file: str | None, note_fit: Callable[[Any], None] | None) -> Any:
        """Return the object with which the process of a detached trainer saves the trainer, and keeps records of it.

        Return None if this type of trainer can neither be saved nor continued by the library.

        Args:
            keeper: Counts the trainer's calls that change the training state.
            left_file: File in which the trainer is saved if it ends after the program that started it has exited. None
                if it is not saved.
            note_fit: Function that stores the progress of `fit` for another process. None if no other process can
                continue this trainer.
        """
        return None

    if not TYPE_CHECKING:  # type checkers should see only `__init__` with its typed arguments

        def __new__(cls, *args: Any, detached: str | Detached | None = None, **kwargs: Any) -> Any:
            """Create a trainer. With `detached`, create a trainer that outlives this program, and return a handle."""
            if detached is None:
                return super().__new__(cls)
            from raysgd.detached.cluster import start

            return start(cls, detached, args, kwargs)
