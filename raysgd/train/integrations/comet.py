"""Comet: a logger for `RunConfig(callbacks=[...])`."""

from __future__ import annotations

from raysgd.train.integrations._missing import require_package

require_package("comet_ml", "comet-ml", "`raysgd.air.integrations.comet`")

from ray.air.integrations.comet import CometLoggerCallback  # noqa: E402

__all__ = ["CometLoggerCallback"]
