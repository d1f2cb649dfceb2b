"""`Dispatcher`: calls callbacks of any kind, and names the one that fails."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raysgd.exceptions import CallbackError

logger = logging.getLogger(__name__)

ADVICE = "What was trained and saved is kept: fix the callback or leave it out, and continue."


class Dispatcher:
    """Calls callbacks in their order, with what their methods take. After one has failed, the caller ends the run.

    Args:
        callbacks: Objects with hooks: methods that are called by name. A hook that one does not have is left out.
        advice: What the user can do where one fails. None lets errors of callbacks through as they are.
    """

    def __init__(self, callbacks: Iterable[Any], advice: str | None = ADVICE) -> None:
        self.callbacks = list(callbacks)
        self._advice = advice

    def on(self, hook: str, *args: Any, **info: Any) -> None:
        """Call a hook of all callbacks.

        Raises:
            CallbackError: One of them failed; those after it are not called.
        """
        for callback in self.callbacks:
            self.call(callback, hook, *args, **info)

    def call(self, callback: Any, hook: str, *args: Any, **info: Any) -> Any:
        """Call a hook of one callback, with what it takes of `info`, and return what it returns.

        Raises:
            CallbackError: It failed.
        """
        method = getattr(callback, hook, None)
        if method is None:  # an object of the user's own class, with only some of the hooks
            return None
        try:
            return call_with_known(method, *args, **info) if info else method(*args)
        except CallbackError:  # of a callback inside this one
            raise
        except Exception as error:
            if self._advice is None:
                raise
            said = f"{type(error).__name__}: {str(error).rstrip('.')}"
            name = name_of(callback)
            raise CallbackError(
                f"The callback `{name}` failed in `{hook}`: {said}. The run ends. {self._advice}"
            ) from error

    def finish(
        self, hooks: Sequence[str], *args: Any, has_failed: bool, only: Iterable[Any] | None = None, **info: Any
    ) -> None:
        """Call the last hooks of each callback, whatever fails. Failures that are not raised are logged.

        Args:
            hooks: Their names.
            args: What is passed to them.
            has_failed: Whether something else has ended the run, which matters more.
            only: The callbacks, if not all.
            info: What is passed to them as far as they take it.

        Raises:
            CallbackError: The first failure in a run that had not failed.
        """
        first: Exception | None = None
        for callback in self.callbacks if only is None else only:
            try:
                for hook in hooks:
                    self.call(callback, hook, *args, **info)
            except Exception as error:
                if has_failed or first is not None:
                    logger.error("the callback `%s` failed at the end: %s", name_of(callback), error)
                first = first or error
        if first is not None and not has_failed:
            raise first


def call_with_known(method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call an override of any generation with those of `named` that it takes."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return method(*args, **named)
    known = {parameter.name for parameter in parameters}
    return method(*args, **{name: value for name, value in named.items() if name in known})


def name_of(callback: Any) -> str:
    """Return what a callback is called: the name of the class that the user gave."""
    return type(getattr(callback, "adapted", callback)).__name__
