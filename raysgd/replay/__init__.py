"""Asks a run what it did: which samples a step had, where its loss jumped, and what a step computes again.

`why` and `find_jumps` read the journal of a run, `raysgd.journal`. `replay` trains a part of the run again in one
process, up to a step, and compares each loss on the way with the journal. `bisect` finds the first step at which two
runs differ.

The folder of a run is data that may come from elsewhere. Nothing in it is unpickled or run: you name the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.replay.bisecting import Difference, bisect
    from raysgd.replay.questions import JumpsFound, Why, find_jumps, why
    from raysgd.replay.replaying import Replayed, replay

__all__ = ["Difference", "JumpsFound", "Replayed", "Why", "bisect", "find_jumps", "replay", "why"]

lazy_names(
    __name__,
    {
        "Difference": "raysgd.replay.bisecting",
        "JumpsFound": "raysgd.replay.questions",
        "Replayed": "raysgd.replay.replaying",
        "Why": "raysgd.replay.questions",
        "bisect": "raysgd.replay.bisecting",
        "find_jumps": "raysgd.replay.questions",
        "replay": "raysgd.replay.replaying",
        "why": "raysgd.replay.questions",
    },
)
