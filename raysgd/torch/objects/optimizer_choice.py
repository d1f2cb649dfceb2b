"""The choice of the optimizers that a call of `backward` or `optimizer_step` is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_NOTHING = nullcontext()


class OptimizerChoice:
    """Knows it from the argument, from what stock code is doing, or because there is only one.

    Args:
        default: `self.optimizer` of the operator; raises where there is none.

    Attributes:
        registered: All registered optimizers.
    """

    def __init__(self, default: Callable[[], Any], registered: Sequence[Any] = ()) -> None:
        self.registered = registered
        self._default = default
        self._acting: Any = None

    def acting_on_usual(self) -> AbstractContextManager[None]:
        """Says the same of `self.optimizer`, which is the one anyway where it is the only one."""
        return self.acting_on(self._default()) if len(self.registered) > 1 else _NOTHING

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
        num_registered = len(self.registered)
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
        registered = () if given is not None else self.registered
        return [each for each in registered if each is not chosen[0]] if len(registered) > 1 else []
