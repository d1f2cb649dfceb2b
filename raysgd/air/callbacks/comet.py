"""The Ray 2.0 import path of `raysgd.air.integrations.comet`: a Comet logger for `fit()` runs."""

from __future__ import annotations

from raysgd.air.integrations.comet import CometLoggerCallback

__all__ = ["CometLoggerCallback"]
