"""The functions of `raysgd.train.session`, importable under the name of the Ray 2.0 module that had such functions."""

from __future__ import annotations

from raysgd.train.session import *  # noqa: F403 - this module only offers it under its former path
from raysgd.train.session import __all__ as __all__
