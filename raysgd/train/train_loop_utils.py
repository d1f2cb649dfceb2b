"""The functions of `raysgd.train.session`, importable under the name of the corresponding Ray 2.0 module."""

from __future__ import annotations

from raysgd.train.session import *  # noqa: F403 - this module only offers it under its former path
from raysgd.train.session import __all__ as __all__
