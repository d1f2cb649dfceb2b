"""Options for global batches; frozen, plain, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._arguments import check_count, check_switch, is_integer, refuse_text, with_entries
from raysgd.messages.batching import check_global_size, config_for_worker, split_batch_size
from raysgd.utils import BATCH_SIZE


@dataclass(frozen=True)
class BatchOptions:
    """The size of the global batch, and how it is divided.

    Attributes:
        split_batches: False: each worker's batch has the size of its loader, so the global batch follows the number of
            workers. True: the global batch has the size of the loader, whatever the number of workers.
        micro_batch_size: The most samples of a constant global batch that a worker takes at once.
        deterministic: Whether a global batch is cut into logical shards, so that its gradient has the same bits on any
            number of workers.
        num_shards: Into how many: the number of workers that the trainer begins with.

    Raises:
        ValueError: A value is unknown, or two of them do not go together.
        InvalidCountError: A count is out of range.
    """

    split_batches: bool = False
    micro_batch_size: int | None = None
    deterministic: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        check_switch("split_batches", self.split_batches)
        if self.micro_batch_size is not None:
            count = check_count(
                "micro_batch_size", self.micro_batch_size, "It is what fits into the memory of one worker."
            )
            object.__setattr__(self, "micro_batch_size", count)  # Python's, if it was numpy's
            if not self.is_global:
                raise ValueError(
                    f"`micro_batch_size={count}` divides a constant global batch only: pass "
                    "`split_batches=True` too, or set the size of a worker's batch in its loader."
                )

        refuse_text(deterministic=self.deterministic)

    @property
    def is_global(self) -> bool:
        """True if the library divides global batches of one size."""
        return self.split_batches or self.deterministic

    @property
    def global_option(self) -> str:
        """The option by which the library divides global batches, as users write it; empty where it does not."""
        if self.split_batches:
            return "`split_batches=True`"
        return "`deterministic=True`" if self.deterministic else ""

    def global_size(self, size: Any, num_workers: int) -> int:
        """Return how many samples a step has that is to have `size`, on so many workers."""
        if self.split_batches:
            return check_global_size(size)
        num_parts = self.num_shards if self.deterministic else num_workers
        return split_batch_size(size, num_parts) * num_parts

    def of_worker(self, size: Any, num_workers: int) -> Any:
        """The most samples that a worker takes at once of batches that have such a size in its config."""
        if not self.split_batches or not is_integer(size):
            return size
        return min(-(-size // num_workers), self.micro_batch_size or size)

    def refuse_with(self, obstacles: Iterable[tuple[bool, str, str]]) -> None:
        """Refuse a constant global batch where workers cannot divide one.

        Args:
            obstacles: Of each, whether it applies, the argument that asks for it, and what to do instead.

        Raises:
            ValueError: One applies.
        """
        for applies, what, way_out in obstacles:
            if self.is_global and applies:
                raise ValueError(f"{self.global_option} cannot work with {what}: {way_out}.")

    def config_for(self, config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
        """The config that an operator is passed, one of so many.

        Raises:
            ValueError: The batch size in it is no size, or cannot be divided.
        """
        if not self.split_batches:
            return config_for_worker(config, self.num_shards if self.deterministic else num_workers)
        if BATCH_SIZE in config:
            check_global_size(config[BATCH_SIZE])
        return with_entries(config)
