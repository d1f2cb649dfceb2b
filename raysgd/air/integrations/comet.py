"""A Comet logger for `RunConfig(callbacks=[...])`, imported from Ray."""

from __future__ import annotations

from raysgd.core.imports import require

require("comet_ml", extra="comet", purpose="`raysgd.air.integrations.comet`")

from ray.air.integrations.comet import CometLoggerCallback  # noqa: E402

__all__ = ["CometLoggerCallback"]
