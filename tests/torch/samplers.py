"""Samplers of users' own, which the tests of several modules draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import torch
from torch.utils.data import Sampler


class EveryGlobalSource(Sampler[int]):
    """Draws from torch's, Python's and numpy's global state."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield int(torch.randint(1000, ())) + random.randrange(1000) + int(numpy.random.randint(1000))

    def __len__(self) -> int:
        return 10


class Epochs(Sampler[int]):
    """Starts each epoch with another sample, as told by `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((index + self.epoch) % 4 for index in range(4))

    def __len__(self) -> int:
        return 4
