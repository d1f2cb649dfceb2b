"""Support for programs of the old library, whose imports have a new name or location.

`install` lets programs written for `ray.util.sgd` run unchanged, as does `python -m raysgd.compat script.py`. `raysgd
migrate` rewrites such programs, and programs written for the former `ray.train` and `ray.air`.

`paths.py` has the table of old and new names; `names.py` lists names that the old library defined in other modules. Two
packages of raysgd have old names themselves, `raysgd.v2` and `raysgd.data`. They stay where programs import them from;
docs/adr/0086-old-imports-lead-to-raysgd.md explains why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.compat.aliases import install

__all__ = ["install"]

lazy_names(__name__, {"install": "raysgd.compat.aliases"})
