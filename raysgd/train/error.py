"""Errors of training functions, under the path that the old library used."""

from __future__ import annotations

from raysgd.exceptions import SessionMisuseError as SessionMisuseError

__all__ = ["SessionMisuseError"]
