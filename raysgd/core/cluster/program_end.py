"""Runs cleanup code when the user's program exits, before Ray's own exit hook."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any
from weakref import finalize

from raysgd.core.cluster.ray_session import is_ray_thread, keep_threads_from_starting_ray, session, session_ended
from raysgd.exceptions import RaySGDError


class ProgramEnd:
    """Runs finalizers, such as stopping a trainer's workers, when the user's program exits.

    Attributes:
        has_begun: True if the program is exiting.
        finalizers: Finalizers that have not run yet, oldest first.
    """

    def __init__(self) -> None:
        self.has_begun = self._is_before_ray = False
        self.finalizers: list[finalize[..., Any]] = []

    def come_before_ray(self) -> None:
        """Register `run` as an exit hook that runs before Ray's exit hook.

        Python runs the newest exit hook first, and Ray registers its hook when it is imported. Call this method again
        after Ray has been imported. Hooks that the user's program registers later run first, while trainers still work.
        """
        if not self._is_before_ray:
            atexit.unregister(self.run)
            atexit.register(self.run)
            self._is_before_ray = "ray" in sys.modules
            if self._is_before_ray:
                keep_threads_from_starting_ray()

    def run(self) -> None:
        """Run the remaining finalizers, newest first, even if a finalizer fails."""
        self.has_begun = True
        for each in reversed(self.finalizers):
            try:
                each()
            except Exception:
                sys.excepthook(*sys.exc_info())


_PROGRAM_END = ProgramEnd()


def end_with(owner: Any, end: Callable[..., Any], *args: Any, **kwargs: Any) -> finalize[..., Any]:
    """Call `end(*args, **kwargs)` when `owner` is garbage collected, or when the program exits, before Ray shuts down.

    A plain `weakref.finalize` may run after Ray's exit hook. Python runs the newest exit hook first, and registers the
    exit hook of all finalizers when the first finalizer in the process is created, possibly before Ray is imported.

    Returns:
        The `weakref.finalize` object.
    """
    finalizer = finalize(owner, end, *args, **kwargs)
    finalizer.atexit = False
    _PROGRAM_END.finalizers = [*(each for each in _PROGRAM_END.finalizers if each.alive), finalizer]
    _PROGRAM_END.come_before_ray()
    return finalizer


def prepare_to_use_ray() -> None:
    """Register the cleanup at program exit. Call this function after Ray is imported and before Ray is started.

    Raises:
        RaySGDError: The program is exiting.
        WorkersLostError: This is a background thread, and the program has ended its Ray session.
    """
    if _PROGRAM_END.has_begun:
        raise RaySGDError("The program is ending, so no workers are started.")
    if is_ray_thread() and session() is None:
        raise session_ended()
    _PROGRAM_END.come_before_ray()
