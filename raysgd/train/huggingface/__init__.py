"""Hugging Face in functions that `fit` runs, where Ray has it."""

from __future__ import annotations

from raysgd._imports import lazy_names

lazy_names(__name__, {})
