"""Operators that write down which samples they train on in each step, for what a journal says about them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from raysgd.utils import IS_PADDING
from tests.torch.operators_for_tests import LinearOperator, setting
from tests.torch.samplers import Epochs
from tests.torch.streamed import StreamOperator


def write_down(operator: Any, numbers: list[int], batch_info: dict[str, Any]) -> None:
    if batch_info[IS_PADDING] or "warm_up" in batch_info:
        return
    line = {
        "at": time.time(),
        "step": operator.global_step + 1,
        "rank": operator.world_rank,
        "numbers": numbers,
        "is_new": operator.is_new_step,
    }
    with Path(operator.config["log"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def seen_in(log: Path) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step and rank, as they were the last time."""
    lines = [json.loads(text) for file in log.glob("*.jsonl") for text in file.read_text().splitlines()]
    found = dict[tuple[int, int], list[int]]()
    for line in sorted(lines, key=lambda each: each["at"]):
        key = line["step"], line["rank"]
        found[key] = line["numbers"] if line["is_new"] else [*found[key], *line["numbers"]]
    return found


class Sevens(BatchSampler):
    """The user's own: its batches are global ones."""


class Seeing(LinearOperator):
    """Trains on a dataset in the order that the config chooses."""

    is_new_step = True

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        order = self.config.get("order")
        if order == "sampler":
            sampler = RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(5))
            return DataLoader(data, batch_size=setting(self.config, "batch_size"), sampler=sampler)
        if order == "epochs":
            return DataLoader(data, batch_size=2, sampler=Epochs())
        if order == "batches":
            return DataLoader(data, batch_sampler=Sevens(RandomSampler(data), 7, drop_last=False))
        return super().make_loader(data, shuffle)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        write_down(self, batch[1].tolist(), batch_info)
        metrics = super().train_batch(batch, batch_info)
        self.is_new_step = self._raysgd.sync.leg.plan.ends_global_batch
        return metrics


class StreamSeeing(StreamOperator):
    """Trains on a stream of 40 shards of 15 rows."""

    is_new_step = True

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        write_down(self, batch[1][:, 1].int().tolist(), batch_info)
        metrics = super().train_batch(batch, batch_info)
        self.is_new_step = self._raysgd.sync.leg.plan.ends_global_batch
        return metrics
