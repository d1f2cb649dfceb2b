"""The functions of `raysgd.train.session`, where Ray 2.0 had those that take keywords."""

from __future__ import annotations

from raysgd.train.session import *  # noqa: F403 - all of it, under its former path
from raysgd.train.session import __all__ as __all__
