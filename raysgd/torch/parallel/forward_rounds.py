"""Forward passes of divided models where ranks have different numbers of batches, or call models differently often.

A forward pass of a divided model takes all ranks. In training all of them take the same steps. In evaluation they need
not: one has more batches, one generates a longer text. So each time that a rank calls a model, all ranks say which one
they call. Those that call none, or another one, get the arguments, run the forward pass too, and drop its output: no
code of the operator sees it. A rank without batches is in rounds until no rank has any.

What else was weighed: ADR 92.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_HAS_LEFT, _AWAITS, _CALLS = range(3)  # behind the last: the number of the model

Exchange = Callable[[int], list[int]]
"""Tells the other ranks a number, and returns the numbers of all ranks."""
Share = Callable[[Any, int], Any]
"""Returns the arguments that the rank with this number has given."""
Context = Callable[[], AbstractContextManager[Any]]


class ForwardRounds:
    """This rank's place in the rounds.

    Args:
        exchange: How the ranks talk.
        share: How they pass arguments.
    """

    def __init__(self, exchange: Exchange, share: Share) -> None:
        self._exchange, self._share = exchange, share
        self._models: Sequence[Any] = ()
        self._is_open = False
        self._context: Context = nullcontext

    @contextmanager
    def opened(self, models: Sequence[Any], context: Context = nullcontext) -> Iterator[None]:
        """An evaluation; ends on all ranks at the same time.

        A rank whose code raises between two forward passes stays for the others, so that they can finish.

        Args:
            models: The models, in the same order on each rank.
            context: That of forward passes.
        """
        self._models, self._context, self._is_open = models, context, True
        try:
            yield
        except Exception:
            self._try_to_help()
            raise
        else:
            self._help(_HAS_LEFT)
        finally:
            self._is_open = False

    def enter(self, model: Any, args: Any, kwargs: Any) -> None:
        """Called ahead of each forward pass; returns when the other ranks run it, too."""
        own = next((number for number, each in enumerate(self._models) if each is model), None)
        if not self._is_open or own is None:
            return
        while self._round(_CALLS + own, (args, kwargs))[0] != own:
            pass

    def pause(self) -> None:
        """Returns when all ranks have come here, or have left the evaluation."""
        if self._is_open:
            self._help(_AWAITS)

    def _try_to_help(self) -> None:
        """After an exception. Where the ranks have lost each other, that one is the better one to tell about."""
        try:
            self._help(_HAS_LEFT)
        except Exception:
            return

    def _help(self, said: int) -> None:
        while True:
            called, is_awaited = self._round(said)
            if called is None and (said == _AWAITS or not is_awaited):
                return

    def _round(self, said: int, call: Any = None) -> tuple[int | None, bool]:
        """Runs a forward pass for other ranks, unless this one is about to run it.

        Returns:
            The model that ranks run; None where no rank calls any. And whether any rank waits for the others.
        """
        answers = self._exchange(said)
        calls = [answer for answer in answers if answer >= _CALLS]
        if not calls:
            return None, _AWAITS in answers
        chosen = min(calls)
        if any(answer != chosen for answer in answers):
            args, kwargs = self._share(call, answers.index(chosen))
            if said != chosen:
                self._run(self._models[chosen - _CALLS], args, kwargs)
        return chosen - _CALLS, False

    def _run(self, model: Any, args: Any, kwargs: Any) -> None:
        self._is_open = False  # its own forward pass is not another round
        try:
            with torch.no_grad(), self._context():
                model(*args, **kwargs)
        finally:
            self._is_open = True


def hook_of(rounds: ForwardRounds) -> Callable[..., None]:
    """Returns what to call ahead of each forward pass of a model, compiled or not."""

    def hook(model: Any, args: Any, kwargs: Any) -> None:
        enter = torch.compiler.disable(rounds.enter) if torch.compiler.is_compiling() else rounds.enter
        enter(model, args, kwargs)

    return hook
