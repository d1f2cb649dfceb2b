"""Which optimizers a call of `backward` or `optimizer_step` is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class OptimizerChoice:
    """Knows it from the argument, from what stock code is doing, or because there is only one.

    Args:
        registered: All registered optimizers.
        default: `self.optimizer` of the operator; raises where there is none.
    """

    def __init__(self, registered: Callable[[], Sequence[Any]], default: Callable[[], Any]) -> None:
        self._registered = registered
        self._default = default
        self._acting: Any = None

    @contextmanager
    def acting_on(self, optimizer: Any) -> Iterator[None]:
        """Says which one the methods are for, to overrides without such an argument too."""
        before, self._acting = self._acting, optimizer
        try:
            yield
        finally:
            self._acting = before

    def chosen(self, method: str, given: Any) -> list[Any]:
        """The optimizers that a method is to act on.

        Raises:
            ValueError: It is not known which ones.
        """
        if given is not None:
            chosen = list(given) if isinstance(given, list | tuple) else [given]
            if not chosen or not all(hasattr(each, "zero_grad") and hasattr(each, "step") for each in chosen):
                raise ValueError(
                    f"`optimizer={given!r}`: pass an optimizer that `register` returned, or a list of them."
                )
            return chosen
        if self._acting is not None:
            return [self._acting]
        num_registered = len(self._registered())
        if num_registered > 1:
            arguments = "loss, " if method == "backward" else ""
            raise ValueError(
                f"`self.{method}` was called without `optimizer`, and {num_registered} optimizers are registered: pass "
                f"the one that it is for, as in `self.{method}({arguments}optimizer=self.optimizer)`, or a list of "
                "them. The gradients of the others would add up."
            )
        return [self._default()]

    def bystanders(self, given: Any, chosen: list[Any]) -> list[Any]:
        """Optimizers that stock code does not step, but whose gradients its one loss is to be the only source of."""
        registered = () if given is not None else self._registered()
        return [each for each in registered if each is not chosen[0]] if len(registered) > 1 else []
