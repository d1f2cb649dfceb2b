"""The parts of `raysgd.train.torch`: the process group of the workers, and helpers for functions that run in them.

Users import it from there.
"""

from raysgd._imports import require

require("torch", extra="torch", purpose="`raysgd.train.torch`")
