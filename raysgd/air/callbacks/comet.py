"""Comet in runs of `fit()`: `raysgd.air.integrations.comet` under its name in Ray 2.0."""

from __future__ import annotations

from raysgd.air.integrations.comet import CometLoggerCallback

__all__ = ["CometLoggerCallback"]
