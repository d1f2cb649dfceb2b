"""Parts of `raysgd.train.torch`: the process group of the workers, and helpers for functions that run in them.

Import them from `raysgd.train.torch`.
"""

from raysgd.core.imports import require

require("torch", extra="torch", purpose="`raysgd.train.torch`")
