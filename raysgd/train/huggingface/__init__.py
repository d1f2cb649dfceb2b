"""Hugging Face support for functions that `fit` runs. The module has the same name as in Ray Train."""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__, {})
