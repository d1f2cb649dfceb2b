"""The end of the program: our cleanup runs before Ray's, and keeps Ray from starting again."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any
from weakref import finalize

from raysgd.core.private_names import find_name
from raysgd.exceptions import RaySGDError


class ProgramEnd:
    """Cleanup at the end of the program.

    Attributes:
        has_begun: True if the program is ending.
        finalizers: Finalizers of what has not ended yet, oldest first.
    """

    def __init__(self) -> None:
        self.has_begun = self._is_before_ray = False
        self.finalizers: list[finalize[..., Any]] = []

    def come_before_ray(self) -> None:
        """Register `run` so that it runs before Ray's exit hook. Python runs the hook first that was added last.

        Ray adds its hook when it is imported. Hooks that the program adds later still find Ray and the trainers
        running.
        """
        if not self._is_before_ray:
            atexit.unregister(self.run)
            atexit.register(self.run)
            self._is_before_ray = "ray" in sys.modules

    def run(self) -> None:
        """End what has not ended yet, newest first, even if some of it raises. Keep Ray from starting again."""
        self.has_begun = True
        auto_init = find_name("ray:_private.auto_init_hook") if "ray" in sys.modules else None
        if auto_init is not None:  # otherwise a call that outlives this would start Ray again
            auto_init.enable_auto_connect = False
        for each in reversed(self.finalizers):
            try:
                each()
            except Exception:
                sys.excepthook(*sys.exc_info())


_PROGRAM_END = ProgramEnd()


def end_with(owner: Any, end: Callable[..., Any], *args: Any, **kwargs: Any) -> finalize[..., Any]:
    """Call `end` when nothing refers to `owner` any more, or at the end of the program, while Ray still runs.

    A plain `weakref.finalize` may run after Ray's exit hook, depending on who made the first finalizer of the program.

    Returns:
        A finalizer, as `weakref.finalize` makes it.
    """
    finalizer = finalize(owner, end, *args, **kwargs)
    finalizer.atexit = False
    _PROGRAM_END.finalizers = [*(each for each in _PROGRAM_END.finalizers if each.alive), finalizer]
    _PROGRAM_END.come_before_ray()
    return finalizer


def prepare_to_use_ray() -> None:
    """Get ready to start Ray. Call it after Ray is imported and before it starts.

    Raises:
        RaySGDError: The program is ending.
    """
    if _PROGRAM_END.has_begun:
        raise RaySGDError("The program is ending, so no workers are started.")
    _PROGRAM_END.come_before_ray()
