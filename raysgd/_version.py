"""Defines raysgd's version number. This module does not import any other module."""

from __future__ import annotations

__version__ = "0.1.0"
