"""Programs, as a seed draws them or as a person writes them down.

A program is a row of words; each one chooses a part of it. What is left out is the plainest part, so that a wrong
program can be made smaller word by word:

    workers=2 kill=1@2 collate=drop batch=9

| word | says |
|---|---|
| `workers=3` | how many workers there are; one without a kill is the driver itself |
| `kill=1@2` | which rank is killed in its step number 2, counted from 0, and `kill=1@2,1` in the second call; or `no` |

The other words are those of a kind: see `choices` in the module of each one, in which the plainest part comes first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Value = str | int
Words = Mapping[str, Value]
Choices = Mapping[str, Sequence[Value]]

SHARED: Choices = {"workers": (1, 2, 3), "kill": ("no",)}
"""The words of all kinds."""
OF_PLAINEST = 0.5
"""How often the plainest part is taken where others are no core: few programs of users have everything."""


def drawn(kind: str, choices: Choices, core: Sequence[str], seed: int) -> dict[str, Value]:
    """Return the words of a seed. Each second one has a kill.

    Args:
        kind: The name of the kind.
        choices: Its words.
        core: Those that the kind is about.
        seed: Of the program.
    """
    chance = random.Random(f"{kind} {seed}")
    words: dict[str, Value] = {"workers": chance.choice((1, 2, 2, 3, 3))}
    kill = f"{chance.randrange(int(words['workers']))}@{chance.randrange(2)},{chance.randrange(2)}"
    words["kill"] = kill if seed % 2 else "no"
    for name, values in choices.items():
        takes_plainest = name not in core and chance.random() < OF_PLAINEST
        words[name] = values[0] if takes_plainest else chance.choice(list(values))
    return words


def read(text: str, choices: Choices) -> dict[str, Value]:
    """Return the words that somebody wrote down, and the plainest ones where none is written.

    Raises:
        ValueError: There is no such word.
    """
    words = {name: values[0] for name, values in {**SHARED, **choices}.items()}
    for each in text.split():
        name, _, value = each.partition("=")
        if name not in words:
            raise ValueError(f"`{each}`: there are the words {', '.join(words)}.")
        words[name] = int(value) if value.isdigit() else value
    return words


def written(words: Words, choices: Choices) -> str:
    """Return the words as a person would write them: without the plainest ones."""
    plainest = {name: values[0] for name, values in {**SHARED, **choices}.items()}
    return " ".join(f"{name}={value}" for name, value in words.items() if value != plainest[name])


def smaller(words: Words, choices: Choices) -> list[dict[str, Value]]:
    """Return the programs that have one plain part more."""
    plainest = {name: values[0] for name, values in {**SHARED, **choices}.items()}
    found = [{**words, name: plainest[name]} for name, value in words.items() if value != plainest[name]]
    if words["workers"] == 3 and words["kill"] == "no":
        found.append({**words, "workers": 2})
    return found


def kill_of(words: Words) -> tuple[int, int, int] | None:
    """Return rank, step and number of the call of the kill; None if there is none."""
    if words["kill"] == "no":
        return None
    rank, _, when = str(words["kill"]).partition("@")
    step, _, call = when.partition(",")
    return int(rank), int(step), int(call or 0)
