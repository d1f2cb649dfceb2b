"""Comet in runs of `fit()`: what `raysgd.air.integrations.comet` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.comet import __all__ as __all__
from raysgd.air.integrations.comet import __dir__ as __dir__
from raysgd.air.integrations.comet import __getattr__ as __getattr__
