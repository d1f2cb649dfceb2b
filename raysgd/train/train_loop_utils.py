"""The functions of `raysgd.train.session` that take keywords, where Ray 2.0 had them."""

from __future__ import annotations

from raysgd.train.session import (
    get_dataset_shard,
    load_checkpoint,
    local_rank,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)

__all__ = [
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]
