"""Forward passes of divided models where ranks have different numbers of batches, or call models differently often.

A part of a divided model is put together by all ranks at once. In training all of them take the same steps. In
evaluation they need not: one has more batches, one generates a longer text. So each time that a rank needs a part, all
ranks agree on the next one to put together, in a round; those that need no part, or another one, put it together too,
take it apart, and go on to the next round. A rank without batches is in rounds until no rank has any.

Why ranks take turns, and what it costs: ADR 92.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Takes the maximum of a tensor over the ranks, in place.
Maximum = Callable[[torch.Tensor], object]


@dataclass(frozen=True, eq=False)
class ShardedModule:
    """A part of a model that `fully_shard` puts together at once.

    Attributes:
        module: What it was called with.
        owner: The module that holds one of its parameters.
        name: The name of that parameter there.
    """

    module: Any
    owner: torch.nn.Module
    name: str

    @property
    def is_held(self) -> bool:
        """True if it is put together on this rank."""
        return not isinstance(getattr(self.owner, self.name), DTensor)

    def put_together(self) -> None:
        """Takes all ranks."""
        self.module.unshard()

    def take_apart(self) -> None:
        """Frees what belongs to others."""
        self.module.reshard()


@dataclass(frozen=True)
class ForwardRound:
    """The answers of all ranks in a round.

    Attributes:
        wanted: For each part, whether any rank needs it next.
        held: For each part, whether any rank has it together; that one could not take part again.
        is_awaited: Whether any rank waits for the others to need no part any more, to go on then.
    """

    wanted: Sequence[bool]
    held: Sequence[bool]
    is_awaited: bool

    @property
    def chosen(self) -> int | None:
        """The part to put together; None where no rank needs any.

        A part that a rank is inside of has to wait until it has left it, so ranks that are further inside go first.

        Raises:
            RuntimeError: Each part that is needed is held by a rank that needs another one.
        """
        needed = [index for index, is_wanted in enumerate(self.wanted) if is_wanted]
        if not needed:
            return None
        free = [index for index in needed if not self.held[index]]
        if not free:
            raise RuntimeError(
                "The workers wait for one another: each is inside a part of a divided model that another one needs. "
                "Call models by `self.model(x)`, not from inside of each other's forward pass."
            )
        return free[0]


@dataclass
class ForwardRounds:
    """This rank's place in the rounds.

    Attributes:
        parts: All parts of all models, in the same order on each rank.
        maximum: How the ranks talk.
        is_open: Whether there are rounds at all: in an evaluation.
    """

    parts: Sequence[ShardedModule] = ()
    maximum: Maximum = field(default=lambda tensor: None)
    is_open: bool = False

    @contextmanager
    def opened(self, parts: Sequence[ShardedModule], maximum: Maximum) -> Iterator[None]:
        """An evaluation; ends on all ranks at the same time.

        A rank whose code raises stays for the others, so that they can finish.
        """
        self.parts, self.maximum, self.is_open = parts, maximum, True
        try:
            yield
        except Exception:
            self._try_to_help()
            raise
        else:
            self._help(is_awaited=False)
        finally:
            self.is_open = False
            for part in parts:
                part.take_apart()

    def enter(self, part: ShardedModule) -> None:
        """Puts a part together that this rank needs."""
        if not self.is_open or part.is_held or part not in self.parts:
            return
        own = self.parts.index(part)
        chosen = self._next(own)
        while chosen != own:
            self._visit(chosen)
            chosen = self._next(own)
        part.put_together()

    def pause(self) -> None:
        """Returns when all ranks have come here, or have left the evaluation."""
        if self.is_open:
            self._help(is_awaited=True)

    def _try_to_help(self) -> None:
        """After an exception. Where the ranks have lost each other, that one is the better one to tell about."""
        try:
            for part in self.parts:
                part.take_apart()  # the forward pass that broke off did not
            self._help(is_awaited=False)
        except Exception:
            return

    def _help(self, is_awaited: bool) -> None:
        while True:
            said = self._say(None, is_awaited)
            if said.chosen is not None:
                self._visit(said.chosen)
            elif is_awaited or not said.is_awaited:
                return

    def _next(self, own: int) -> int:
        chosen = self._say(own, is_awaited=False).chosen
        assert chosen is not None, "this rank needs one"
        return chosen

    def _visit(self, chosen: int) -> None:
        self.parts[chosen].put_together()
        self.parts[chosen].take_apart()

    def _say(self, own: int | None, is_awaited: bool) -> ForwardRound:
        wanted = [index == own for index in range(len(self.parts))]
        held = [part.is_held for part in self.parts]
        said = torch.tensor([*wanted, *held, is_awaited], dtype=torch.uint8)
        self.maximum(said)
        heard = [bool(value) for value in said.tolist()]
        count = len(self.parts)
        return ForwardRound(heard[:count], heard[count:-1], heard[-1])


def hook_of(rounds: ForwardRounds, part: ShardedModule) -> Callable[..., None]:
    """Returns what to call ahead of each forward pass of a part, compiled or not."""
    enter = partial(rounds.enter, part)

    def hook(module: Any, args: Any) -> None:
        torch.compiler.disable(enter)() if torch.compiler.is_compiling() else enter()

    return hook
