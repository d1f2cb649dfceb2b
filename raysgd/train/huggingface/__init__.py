"""Hugging Face in functions that `fit` runs, under the same module name as in Ray."""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__, {})
