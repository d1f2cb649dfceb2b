"""Functions to investigate a past run.

`why` shows the samples and the loss of a step, and `find_jumps` finds steps at which the loss jumped. Both read the
journal of the run (see `raysgd.journal`). `replay` repeats a part of the run in one process, up to a given step, and
compares each loss with the journal. `bisect` finds the first step at which two runs differ.

The folder of a run may come from someone else. Nothing in the folder is executed or unpickled. Only the program that
you name is run.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
