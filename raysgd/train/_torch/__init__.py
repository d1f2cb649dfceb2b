"""Parts of `raysgd.train.torch`: the workers' process group, and helpers for functions that run in the workers.

Import them from `raysgd.train.torch`.
"""

from raysgd.core.imports import require

require("torch", extra="torch", purpose="`raysgd.train.torch`")
