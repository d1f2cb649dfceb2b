"""Where `Dataset` of `ray.util.sgd.data` will be. Until then importing it says what to use instead."""

from __future__ import annotations

from raysgd.compat.names import former_names

__all__: list[str] = []

__getattr__, __dir__ = former_names(__name__)
