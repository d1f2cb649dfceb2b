"""`BatchOptions`: the trainer's options for the global batch, the samples that all workers train on in one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.core.arguments import check_count, check_switch, is_integer, refuse_text, with_entries
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.trainer.configuration.batching import check_global_size, config_for_worker, split_batch_size


@dataclass(frozen=True)
class BatchOptions:
    """Options for the size of the global batch, and for how the global batch is split among workers.

    The values are checked when an object is created, and cannot be changed later.

    Attributes:
        split_batches: If False, each worker's batch has the batch size of the loader. The global batch then grows with
            the number of workers, unless `deterministic` is True. If True, the global batch has the batch size of the
            loader for any number of workers.
        micro_batch_size: Maximum number of samples that a worker processes at once. Only with `split_batches=True` or
            `deterministic=True`. "auto" to halve the batches when a worker runs out of memory.
        deterministic: If True, each global batch is split into a fixed number of shards. The gradient of the global
            batch is then bitwise identical on any number of workers.
        num_shards: The number of these shards, which is the number of workers that the user requested.

    Raises:
        ValueError: A value is invalid, or two values contradict each other.
        InvalidCountError: A count is out of range.
    """

    split_batches: bool = False
    micro_batch_size: int | Literal["auto"] | None = None
    deterministic: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        check_switch("split_batches", self.split_batches)
        if self.is_auto and (self.deterministic or not self.split_batches):
            raise ValueError(
                '`micro_batch_size="auto"` divides the batches of `split_batches=True` without `deterministic=True`, '
                "whose shards are fixed: pass only the first, or a number of samples."
            )
        if self.micro_batch_size is not None and not self.is_auto:
            count = check_count(
                "micro_batch_size", self.micro_batch_size, 'It is what fits into a GPU or worker; "auto" finds it.'
            )
            object.__setattr__(self, "micro_batch_size", count)  # as a Python integer, even if it was a NumPy integer
            if not self.is_global:
                raise ValueError(
                    f"`micro_batch_size={count}` splits only a constant global batch: pass "
                    "`split_batches=True` too, or set the size of a worker's batch in its loader."
                )

        refuse_text(deterministic=self.deterministic)

    @property
    def is_auto(self) -> bool:
        """True if the batches that a worker processes at once are halved when a worker runs out of memory."""
        return self.micro_batch_size == "auto"

    @property
    def cap(self) -> int | None:
        """Maximum number of samples that a worker processes at once, if the user has chosen one."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def is_global(self) -> bool:
        """True if global batches have a fixed size, and the library splits them among the current workers."""
        return self.split_batches or self.deterministic

    @property
    def global_option(self) -> str:
        """Text for messages: the option that fixes the size of the global batch, such as "`split_batches=True`".

        Empty if no option does.
        """
        if self.split_batches:
            return "`split_batches=True`"
        return "`deterministic=True`" if self.deterministic else ""

    def global_size(self, size: Any, num_workers: int) -> int:
        """Return how many samples all workers together train on in one step.

        Args:
            size: The batch size in the trainer's config.
            num_workers: Number of workers.
        """
        if self.split_batches:
            return check_global_size(size)
        num_parts = self.num_shards if self.deterministic else num_workers
        return split_batch_size(size, num_parts) * num_parts

    def of_worker(self, size: Any, num_workers: int) -> Any:
        """Return how many samples one worker processes at once.

        Args:
            size: The batch size in the worker's config.
            num_workers: Number of workers.
        """
        if not self.split_batches or not is_integer(size):
            return size
        return min(-(-size // num_workers), self.cap or size)

    def refuse_with(self, obstacles: Iterable[tuple[bool, str, str]]) -> None:
        """Raise an error if these options fix the size of the global batch, but the library cannot split such batches.

        Args:
            obstacles: Reasons why batches cannot be split. Each is a tuple of a flag (True if the reason applies), the
                argument that is the reason, and advice.

        Raises:
            ValueError: A reason applies.
        """
        for applies, what, way_out in obstacles:
            if self.is_global and applies:
                raise ValueError(f"{self.global_option} cannot work with {what}: {way_out}.")

    def config_for(self, config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
        """Return the config for the operator of one worker.

        With `split_batches`, the config keeps the global batch size. With `deterministic`, the size of one shard
        replaces it. With neither option, the batch size of one worker replaces it.

        Args:
            config: The trainer's config. Its `BATCH_SIZE` is the global batch size.
            num_workers: Number of workers.

        Raises:
            ValueError: The config's batch size is invalid or cannot be split.
        """
        if not self.split_batches:
            return config_for_worker(config, self.num_shards if self.deterministic else num_workers)
        if BATCH_SIZE in config:
            check_global_size(config[BATCH_SIZE])
        return with_entries(config)
