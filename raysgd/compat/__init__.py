"""Support for programs of the old library whose imports have a new name or place.

`install` lets programs for `ray.util.sgd` run unchanged, and so does `python -m raysgd.compat script.py`. `raysgd
migrate` rewrites such programs, and those for the former `ray.train` and `ray.air`.

`paths.py` has the one table of old and new names; `names.py` lists names that the old library had in other modules.
Two packages have old names themselves, `raysgd.v2` and `raysgd.data`. They stay where programs import them from;
docs/adr/0086-old-imports-lead-to-raysgd.md says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.compat.aliases import install

__all__ = ["install"]

lazy_names(__name__, {"install": "raysgd.compat.aliases"})
