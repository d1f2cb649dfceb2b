"""Support for programs written for the old library: `ray.util.sgd`, and the former `ray.train` and `ray.air`.

`install` lets programs written for `ray.util.sgd` run unchanged, as does `python -m raysgd.compat script.py`. `raysgd
migrate` rewrites such programs, and programs written for the former `ray.train` and `ray.air`.

`paths.py` has the table of old and new names. `names.py` lists names that raysgd defines in a different module than the
old library did. Two packages of raysgd still have the names of the old library's packages: `raysgd.v2` and
`raysgd.data`. docs/adr/0086-old-imports-lead-to-raysgd.md explains why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.compat.aliases import install

__all__ = ["install"]

lazy_names(__name__, {"install": "raysgd.compat.aliases"})
