"""Data for the class-based trainers: `Dataset`, arrays and data frames, Ray Data datasets, and streams."""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
