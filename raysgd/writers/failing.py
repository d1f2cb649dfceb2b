"""Failures of what writes metrics: each costs a warning, and none ends a training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raysgd._text.once import Once
from raysgd._text.secrets import masked

logger = logging.getLogger(__name__)


class FailureWarnings:
    """Turns what fails into warnings, one for each kind of error.

    Args:
        owner: What fails, as the user calls it.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._once = Once()

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Warn instead of raising what the block raises, and leave out the rest of the block."""
        try:
            yield
        except Exception as error:  # of a disk, of a service, or a mistake: days of training do not end for it
            kind = type(error).__name__
            if self._once.is_first(kind):
                logger.warning(
                    "%s: could not write (%s: %s); the run continues, and it tries again with the next result",
                    self._owner,
                    kind,
                    masked(str(error)),
                )
