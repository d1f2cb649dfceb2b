"""Callbacks for Keras in runs of `fit()`: what `raysgd.air.integrations.keras` has, where Ray 2.0 had it."""

from __future__ import annotations

from raysgd.air.integrations.keras import Callback, ReportCheckpointCallback

__all__ = ["Callback", "ReportCheckpointCallback"]
