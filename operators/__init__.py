"""Ready-made training operators: subclasses of `TrainingOperator` for common tasks.

What it guarantees:

* Every operator here trains on one or many workers, on CPUs or GPUs, in full or in mixed precision, and can be saved,
  resumed and resized like one that you wrote yourself: it overrides the same methods.
* A config that makes no sense is refused in `setup` with a `ValueError` that says what is allowed.

What it leaves to others: the networks and the data are yours. Override the `build_...` methods of an operator to give
them, subclass it further, or copy it: nothing in `raysgd` depends on this package.

Import it as `raysgd.operators`. It stands at the top of the repository, beside the examples, because it is code to read
and to copy from; a link inside the package leads there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports import lazy_names, require_installed

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
