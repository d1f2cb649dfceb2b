"""The configs, checkpoints and results of trainers with a `fit()` method, named as in `ray.air`.

`raysgd.train` exports the same classes, except `DatasetConfig`. Importing the classes neither starts Ray nor imports a
framework. `raysgd.storage` stores the files.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
