"""`SessionMisuseError`, importable under the old library's module name."""

from __future__ import annotations

from raysgd.exceptions import SessionMisuseError as SessionMisuseError

__all__ = ["SessionMisuseError"]
