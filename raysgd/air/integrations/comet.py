"""Comet in runs of `fit()`: a logger for `RunConfig(callbacks=[...])`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.air.integrations._comet import CometLoggerCallback

__all__ = ["CometLoggerCallback"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.air.integrations._comet"))
