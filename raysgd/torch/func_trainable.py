"""A second import path for the functions of `raysgd.tune.torch`.

Programs for the old library, `ray.util.sgd`, import the functions from here.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(
    __name__,
    {
        "DistributedTrainableCreator": "raysgd.tune.torch",
        "distributed_checkpoint": "raysgd.tune.torch:distributed_checkpoint_dir",
        "distributed_checkpoint_dir": "raysgd.tune.torch",
        "is_distributed_trainable": "raysgd.tune.torch",
    },
)
