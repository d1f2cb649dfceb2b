"""Comet in runs of `fit()`: what `raysgd.air.integrations.comet` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.comet import CometLoggerCallback

__all__ = ["CometLoggerCallback"]
