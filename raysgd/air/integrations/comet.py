"""Comet in runs of `fit()`: what `raysgd.train.integrations.comet` has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.train.integrations.comet import CometLoggerCallback

__all__ = ["CometLoggerCallback"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "raysgd.train.integrations.comet"))
