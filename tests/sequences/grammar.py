"""Sequences of calls and deaths, as a seed draws them or as a person writes them down.

A sequence is a row of words: calls of a trainer, and deaths before or in the next call.

    train lose:1 validate kill:1 train
    train:5 call:2,40 data grow soon:0,12 predict

A call is a name, perhaps with a number of steps or epochs. A death has ranks and a moment:

| word | who dies, and when |
|---|---|
| `kill:1` or `kill:0,2` | these ranks, at once; the next call follows immediately |
| `lose:1` | the same, but there is time to notice |
| `soon:1,12` | rank 1, so many milliseconds after the next call was sent |
| `call:1,40` | rank 1, as it enters function number 40 of the library in the next call, or in a recovery in it |
| `hook:1,item,3` | rank 1, as it comes to a place in the user's code for the third time |
| `process` | the process of a detached trainer, at once; with a number as in `soon` |

Ranks count those that live. In sequences of the kind `ends`, `end:trainer-ray` says what a program ends, in this order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOMENTS = ("kill", "lose", "soon", "call", "hook", "process")
"""All words for deaths."""
GROWTH = "grow"
NUM_WORKERS = 3


@dataclass(frozen=True)
class Word:
    """A call or a death.

    Attributes:
        name: What happens.
        arguments: Numbers and places.
    """

    name: str
    arguments: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, self.arguments))}" if self.arguments else self.name

    @property
    def is_death(self) -> bool:
        return self.name in MOMENTS

    @property
    def number(self) -> int | None:
        """The number of steps or epochs of a call."""
        return int(self.arguments[0]) if self.arguments else None


@dataclass(frozen=True)
class Grammar:
    """What may happen to a kind of trainer.

    Attributes:
        calls: How often each call is drawn, in proportion.
        most: For calls that take a number, the largest; they are drawn with and without it.
        hooks: Places in the user's code.
        moments: How often each moment of a death is drawn, in proportion.
    """

    calls: Mapping[str, int]
    most: Mapping[str, int]
    hooks: Sequence[str]
    moments: Mapping[str, int]

    def drawn(self, seed: int) -> list[Word]:
        """Return the sequence of a seed."""
        chance = random.Random(seed)
        words: list[Word] = []
        for _ in range(chance.randint(3, 7)):
            deaths = [self._death(chance) for _ in range(chance.choice((0, 0, 1, 1, 1, 2)))]
            growth = [Word(GROWTH)] if chance.random() < 0.2 and words else []
            words += [*deaths, *growth] if chance.random() < 0.3 else [*growth, *deaths]
            words.append(self._call(chance))
        return words

    def _call(self, chance: random.Random) -> Word:
        [name] = chance.choices([*self.calls], [*self.calls.values()])
        most = self.most.get(name)
        return Word(name, (chance.randint(1, most),)) if most is not None and chance.random() < 0.4 else Word(name)

    def _death(self, chance: random.Random) -> Word:
        moments = {name: weight for name, weight in self.moments.items() if name != "hook" or self.hooks}
        [moment] = chance.choices([*moments], [*moments.values()])
        rank = chance.randrange(NUM_WORKERS)
        if moment in ("kill", "lose"):
            num_victims = chance.choice((1, 1, 1, 1, 2))
            return Word(moment, tuple(sorted(chance.sample(range(NUM_WORKERS), num_victims))))
        if moment == "soon":
            return Word(moment, (rank, chance.randrange(30)))
        if moment == "call":
            return Word(moment, (rank, int(math.exp(chance.uniform(0, math.log(1500))))))
        if moment == "hook":
            return Word(moment, (rank, chance.choice(self.hooks), chance.choice((1, 1, 2, 5))))
        return Word(moment, chance.choice(((), (chance.randrange(30),))))


def read(text: str) -> list[Word]:
    """Return a sequence that somebody wrote down."""
    return [_word(each) for each in text.split()]


def _word(text: str) -> Word:
    name, _, arguments = text.partition(":")
    values = [int(each) if each.isdigit() else each for each in filter(None, arguments.split(","))]
    return Word(name, tuple(values))
