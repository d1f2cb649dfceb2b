"""Callbacks for Keras: those of `raysgd.train.integrations.keras`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.train.integrations.keras import Callback, ReportCheckpointCallback

__all__ = ["Callback", "ReportCheckpointCallback"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.train.integrations.keras"))
