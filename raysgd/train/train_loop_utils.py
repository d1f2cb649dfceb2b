"""The functions of `raysgd.train.session`, under the former path of those that take keywords in Ray 2.0."""

from __future__ import annotations

from raysgd.train.session import *  # noqa: F403 - this module only offers it under its former path
from raysgd.train.session import __all__ as __all__
