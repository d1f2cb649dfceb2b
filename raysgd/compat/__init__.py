"""Support for programs written for `ray.util.sgd` or the former `ray.train` and `ray.air`, together the "old library".

* `python -m raysgd.compat script.py` runs a program for `ray.util.sgd` unchanged. A program can also call `install`
  first, and its other code then runs unchanged.
* `raysgd migrate` rewrites programs for `ray.util.sgd`, and for the former `ray.train` and `ray.air`.

`paths.ini` has the table of old and new names, which `paths.py` reads. `names.py` lists the old names that raysgd
defines in one module and also exports from the module where programs expect them. Two packages of raysgd still have the
names of packages of the old library: `raysgd.v2` and `raysgd.data`. docs/adr/0086-old-imports-lead-to-raysgd.md
explains why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.compat.aliases import install

__all__ = ["install"]

lazy_names(__name__, {"install": "raysgd.compat.aliases"})
