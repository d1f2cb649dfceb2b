"""The functions of `raysgd.train.session`, under the path that Ray 2.0 used for the functions that take keywords."""

from __future__ import annotations

from raysgd.train.session import *  # noqa: F403 - this module only offers it under its former path
from raysgd.train.session import __all__ as __all__
