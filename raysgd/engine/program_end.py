"""The end of the program: what runs in Ray is ended before Ray is, and nothing starts Ray again."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any
from weakref import finalize

from raysgd._private_names import find_name
from raysgd.exceptions import RaySGDError


class ProgramEnd:
    """What is done when the program ends.

    Attributes:
        has_begun: Whether the program is ending.
        finalizers: End what is not ended yet, in the order in which it was begun.
    """

    def __init__(self) -> None:
        self.has_begun = self._is_before_ray = False
        self.finalizers: list[finalize[..., Any]] = []

    def come_before_ray(self) -> None:
        """Be run before Ray's own exit hook. Python runs the last one first, and Ray adds its one when it is imported.

        Hooks of the program that are added later still find Ray and the trainers running.
        """
        if not self._is_before_ray:
            atexit.unregister(self.run)
            atexit.register(self.run)
            self._is_before_ray = "ray" in sys.modules

    def run(self) -> None:
        """End what is not ended yet, the newest first, whatever fails, and keep Ray from starting again."""
        self.has_begun = True
        auto_init = find_name("ray:_private.auto_init_hook") if "ray" in sys.modules else None
        if auto_init is not None:  # or a call that outlives this would start another Ray
            auto_init.enable_auto_connect = False
        for each in reversed(self.finalizers):
            try:
                each()
            except Exception:
                sys.excepthook(*sys.exc_info())


_PROGRAM_END = ProgramEnd()


def end_with(owner: Any, end: Callable[..., Any], *args: Any, **kwargs: Any) -> finalize[..., Any]:
    """Call `end` when nothing refers to `owner` any more, or when the program ends, while Ray still runs.

    A hook of `weakref.finalize` may run after that of Ray: it is added with the first finalizer of the whole program.

    Returns:
        A finalizer, as `weakref.finalize` makes it.
    """
    finalizer = finalize(owner, end, *args, **kwargs)
    finalizer.atexit = False
    _PROGRAM_END.finalizers = [*(each for each in _PROGRAM_END.finalizers if each.alive), finalizer]
    _PROGRAM_END.come_before_ray()
    return finalizer


def prepare_to_use_ray() -> None:
    """Call this once Ray is imported and before it is started.

    Raises:
        RaySGDError: The program is ending.
    """
    if _PROGRAM_END.has_begun:
        raise RaySGDError("The program is ending, so no workers are started.")
    _PROGRAM_END.come_before_ray()
