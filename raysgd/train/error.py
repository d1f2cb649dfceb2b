"""Errors of training functions, where the old library had them."""

from __future__ import annotations

from raysgd.exceptions import SessionMisuseError as SessionMisuseError

__all__ = ["SessionMisuseError"]
