"""Functions to investigate a past run.

`why` shows the samples and the loss of a step, and `find_jumps` finds steps at which the loss jumped. Both read the
journal of the run (see `raysgd.journal`). `replay` repeats a part of the run in one process, up to a given step, and
compares each loss with the journal. `bisect` finds the first step at which two runs differ.

The folder of a run may come from someone else. Nothing in the folder is executed or unpickled. Only the program that
you name is run.
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
