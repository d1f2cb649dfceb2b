"""Where `Dataset` of `ray.util.sgd.data` will be. Until then importing it says what to use instead."""

from __future__ import annotations

from raysgd._lazy import lazy_names

__all__: list[str] = []

__getattr__, __dir__ = lazy_names(
    __name__,
    {},
    not_here={
        "Dataset": (
            "`raysgd.data.Dataset` is not available yet. `TorchTrainer.train(dataset=...)` takes any object with "
            "`set_num_shards(n)` and `get_shard(i)`; or register a loader in `setup`, which raysgd divides for you."
        )
    },
)
