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

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names, require_installed

require_installed("torch", extra="torch", purpose="`raysgd.operators`")

if TYPE_CHECKING:
    from raysgd.operators.classification import ClassificationOperator
    from raysgd.operators.gan import GANOperator
    from raysgd.operators.hugging_face import HuggingFaceOperator
    from raysgd.operators.packing import collate_packs, pack
    from raysgd.operators.regression import RegressionOperator
    from raysgd.operators.segmentation import SegmentationOperator

__all__ = [
    "ClassificationOperator",
    "RegressionOperator",
    "SegmentationOperator",
    "HuggingFaceOperator",
    "GANOperator",
    "collate_packs",
    "pack",
]

lazy_names(
    __name__,
    {
        "ClassificationOperator": "raysgd.operators.classification",
        "GANOperator": "raysgd.operators.gan",
        "HuggingFaceOperator": "raysgd.operators.hugging_face",
        "RegressionOperator": "raysgd.operators.regression",
        "SegmentationOperator": "raysgd.operators.segmentation",
        "collate_packs": "raysgd.operators.packing",
        "pack": "raysgd.operators.packing",
    },
)
