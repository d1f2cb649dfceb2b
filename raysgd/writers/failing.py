"""Failures of what writes metrics: each costs a warning, and none ends a training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from raysgd._once import Once
from raysgd._secrets import masked

Method = TypeVar("Method", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


def never_ends_a_run(method: Method) -> Method:
    """Let a method of a logger fail with a warning, one for each object and kind of error, and return None."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # of a disk, of a service, or a mistake: days of training do not end for it
            once: Once = vars(self).setdefault("_warned", Once())
            if once.is_first(type(error).__name__):
                logger.warning(
                    "%s: could not write (%s: %s); the run goes on, and it tries again with the next result",
                    type(self).__name__,
                    type(error).__name__,
                    masked(str(error)),
                )
            return None

    return cast("Method", call)
