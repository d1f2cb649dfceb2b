"""The handle of a call that runs while the program goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")


class CallHandle(ABC, Generic[T]):
    """A call of a trainer that is running, or has ended."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return what it came to.

        Args:
            timeout: How many seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It goes on.
            Exception: What the call itself has raised.
        """
