"""`BatchOptions`: the trainer's options for the global batch, the samples that all workers train on in one step.

The user sets one batch size for all workers, and each worker gets an equal part. All results are computed from the size
that the user requested, so rounding does not accumulate when a group shrinks from 4 to 3 workers and grows back to 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.core.arguments import check_count, check_switch, is_integer, refuse_text, with_entries
from raysgd.core.config_keys import BATCH_SIZE


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
        replaces it. With neither option, the batch size of one worker replaces it. A plain `"batch_size"` is already
        the batch size of one worker. The config is a shallow copy: its values are the user's objects.

        Args:
            config: The trainer's config. Its `BATCH_SIZE` is the global batch size.
            num_workers: Number of workers.

        Raises:
            ValueError: The config's batch size is invalid or cannot be split.

        Examples:
            >>> BatchOptions().config_for({"*batch_size": 64, "lr": 0.1}, num_workers=4)
            {'*batch_size': 16, 'lr': 0.1}
        """
        if BATCH_SIZE not in config:
            return with_entries(config)
        size = check_global_size(config[BATCH_SIZE])
        if not self.split_batches:
            size = split_batch_size(size, self.num_shards if self.deterministic else num_workers)
        return with_entries(config, {BATCH_SIZE: size})


_PLAIN = "Pass a plain `int`."


def split_batch_size(requested: int, num_workers: int) -> int:
    """Return the batch size of one worker: the global batch size divided by the number of workers, rounded down.

    Args:
        requested: The global batch size, of any integer type. Search algorithms, for example, pass NumPy integers.
        num_workers: Number of workers, at least 1.

    Raises:
        ValueError: A value is not an integer or is below 1, or there are more workers than samples in a step.

    Examples:
        >>> split_batch_size(21, num_workers=2)
        10
    """
    num_samples = check_global_size(requested)
    size = check_count("num_workers", num_workers, _PLAIN)
    per_worker = num_samples // size
    if per_worker == 0:
        raise ValueError(
            f"`config[{BATCH_SIZE!r}]={num_samples}` with `num_workers={size}`: this batch size is the global one, for "
            f"all workers, so it must be at least `num_workers`. Raise it to {size} or more, or use fewer workers."
        )
    return per_worker


def global_batch_in_words(num_workers: int, batch_size: int) -> str:
    """Describe a global batch whose size depends on the number of workers.

    Args:
        num_workers: Number of workers.
        batch_size: Number of samples in the batch of one worker.

    Examples:
        >>> global_batch_in_words(2, 32)
        '2 workers x 32 samples: a global batch of 64'
    """
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{workers} x {batch_size} samples: a global batch of {num_workers * batch_size}"


def check_global_size(requested: Any) -> int:
    """Check a global batch size, and return it as a Python integer.

    Raises:
        ValueError: The batch size is not an integer or is below 1.
    """
    return check_count(f"config[{BATCH_SIZE!r}]", requested, _PLAIN)
