"""Random edits of the engine that neither the simulator nor a unit test finds, and why that is right."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {}
