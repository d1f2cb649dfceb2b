"""Callbacks for Keras in runs of `fit()`: `raysgd.air.integrations.keras` under its name in Ray 2.0."""

from __future__ import annotations

from raysgd.air.integrations.keras import Callback, ReportCheckpointCallback

__all__ = ["Callback", "ReportCheckpointCallback"]
