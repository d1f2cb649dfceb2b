"""The Ray 2.0 import path of `raysgd.air.integrations.keras`: Keras callbacks for `fit()` runs."""

from __future__ import annotations

from raysgd.air.integrations.keras import Callback, ReportCheckpointCallback

__all__ = ["Callback", "ReportCheckpointCallback"]
