"""A dataset whose random numbers belong to the batch, whichever process loads it and when."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from raysgd.torch.data.batch_sampler import SeededIndices
from raysgd.torch.objects import rng


class SeededRows(Dataset[Any]):
    """A map-style dataset that gives whole batches, and seeds the generators for each of them.

    What `collate_fn` draws comes from there, too. Other attributes are those of the dataset inside.

    Args:
        dataset: The user's.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """The samples of a batch."""
        if isinstance(indices, SeededIndices):
            rng.seed_alike(indices.seed)
        whole = getattr(self._dataset, "__getitems__", None)
        return whole(list(indices)) if whole else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)
