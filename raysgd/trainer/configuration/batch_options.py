"""Options for global batches: immutable values that are checked on creation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.arguments import check_count, check_switch, is_integer, refuse_text, with_entries
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.trainer.configuration.batching import check_global_size, config_for_worker, split_batch_size


@dataclass(frozen=True)
class BatchOptions:
    """The size of the global batch, and how it is split among workers.

    Attributes:
        split_batches: False: each worker's batch has the loader's batch size, so the global batch grows with the number
            of workers. True: the global batch has the loader's batch size for any number of workers.
        micro_batch_size: Maximum number of samples that a worker processes at once, if the global batch size is
            constant.
        deterministic: True to split each global batch into logical shards, so that its gradient is bitwise identical on
            any number of workers.
        num_shards: Number of logical shards. It equals the trainer's initial number of workers.

    Raises:
        ValueError: A value is invalid, or two values contradict each other.
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
            object.__setattr__(self, "micro_batch_size", count)  # a Python integer, even if a NumPy integer was passed
            if not self.is_global:
                raise ValueError(
                    f"`micro_batch_size={count}` splits only a constant global batch: pass "
                    "`split_batches=True` too, or set the size of a worker's batch in its loader."
                )

        refuse_text(deterministic=self.deterministic)

    @property
    def is_global(self) -> bool:
        """True if these options make raysgd split global batches of a fixed size."""
        return self.split_batches or self.deterministic

    @property
    def global_option(self) -> str:
        """The option that makes raysgd split global batches, as text such as "`split_batches=True`"; empty if unset."""
        if self.split_batches:
            return "`split_batches=True`"
        return "`deterministic=True`" if self.deterministic else ""

    def global_size(self, size: Any, num_workers: int) -> int:
        """Return the number of samples in a step with batch size `size` on `num_workers` workers."""
        if self.split_batches:
            return check_global_size(size)
        num_parts = self.num_shards if self.deterministic else num_workers
        return split_batch_size(size, num_parts) * num_parts

    def of_worker(self, size: Any, num_workers: int) -> Any:
        """Return how many samples a worker processes at once, where `size` is the batch size in its config."""
        if not self.split_batches or not is_integer(size):
            return size
        return min(-(-size // num_workers), self.micro_batch_size or size)

    def refuse_with(self, obstacles: Iterable[tuple[bool, str, str]]) -> None:
        """Raise an error if these options require a constant global batch, but an obstacle prevents splitting it.

        Args:
            obstacles: Tuples of a flag (True if the obstacle applies), the argument that causes the obstacle, and
                advice.

        Raises:
            ValueError: An obstacle applies.
        """
        for applies, what, way_out in obstacles:
            if self.is_global and applies:
                raise ValueError(f"{self.global_option} cannot work with {what}: {way_out}.")

    def config_for(self, config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
        """Return the config for the operator of one worker in a group of `num_workers`.

        Unless `split_batches` is set, the global batch size is replaced with the size of one worker's part, or of one
        logical shard if `deterministic` is set.

        Raises:
            ValueError: The config's batch size is invalid or cannot be split.
        """
        if not self.split_batches:
            return config_for_worker(config, self.num_shards if self.deterministic else num_workers)
        if BATCH_SIZE in config:
            check_global_size(config[BATCH_SIZE])
        return with_entries(config)
