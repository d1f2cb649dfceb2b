"""Ready-made training operators: subclasses of `TrainingOperator` for common tasks.

Subclass an operator, and override its `build_...` methods to return your networks and your data.

* Each operator overrides only public methods of `TrainingOperator`, like an operator that you write yourself. Like any
  operator, it runs on one or many workers, on CPUs or GPUs, in full or mixed precision, and can be saved and resumed.
* If a config value is invalid, `setup` raises a `ValueError` that lists the allowed values.

Import the package as `raysgd.operators`. Its source is at the top of the repository, next to the examples, because you
are meant to read the code and copy from it. Nothing in `raysgd` depends on it, and `raysgd/operators` is a symbolic
link to it.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names, require_installed

require_installed("torch", extra="torch", purpose="`raysgd.operators`")


lazy_names(__name__)
