"""Callbacks for `model.fit` of Keras that report to a run of `fit()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.air.integrations._keras import Callback, ReportCheckpointCallback

__all__ = ["Callback", "ReportCheckpointCallback"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.air.integrations._keras"))
