"""Options for joint batches; frozen, plain, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._arguments import check_count, did_you_mean, is_integer, refuse_text, with_entries
from raysgd.messages.batching import check_joint_size, config_for_worker, split_batch_size
from raysgd.utils import BATCH_SIZE

CONSTANT = "constant"
SPEED = "speed"
_JOINT = ("per_worker", CONSTANT)


@dataclass(frozen=True)
class BatchOptions:
    """The size of the joint batch, and how it is divided.

    Attributes:
        joint_batch: "per_worker": each worker's batch has the size of its loader, so the joint batch follows the number
            of workers. "constant": the joint batch has the size of the loader, whatever the number of workers.
        max_batch_per_worker: The most samples of a constant joint batch that a worker takes at once.
        balance: "speed": shares follow the speed of the workers. None: they are even.
        deterministic: Whether a joint batch is cut into logical shards, so that its gradient has the same bits on any
            number of workers.
        num_shards: Into how many: the number of workers that the trainer begins with.

    Raises:
        ValueError: A value is unknown, or two of them do not go together.
        InvalidCountError: A count is out of range.
    """

    joint_batch: str = "per_worker"
    max_batch_per_worker: int | None = None
    balance: str | None = None
    deterministic: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.joint_batch not in _JOINT:
            hint = did_you_mean(str(self.joint_batch), _JOINT)
            raise ValueError(f'`joint_batch={self.joint_batch!r}`: allowed are "per_worker" and "constant".{hint}')
        if self.max_batch_per_worker is not None:
            count = check_count(
                "max_batch_per_worker", self.max_batch_per_worker, "It is what fits into the memory of one worker."
            )
            object.__setattr__(self, "max_batch_per_worker", count)  # Python's, if it was numpy's
            if not self.is_joint:
                raise ValueError(
                    f"`max_batch_per_worker={count}` divides a constant joint batch only: pass "
                    '`joint_batch="constant"` too, or set the size of a worker\'s batch in its loader.'
                )

        self._check_balance()

    def _check_balance(self) -> None:
        if self.balance not in (None, SPEED):
            hint = did_you_mean(str(self.balance), [SPEED])
            raise ValueError(f'`balance={self.balance!r}`: allowed are None and "speed".{hint}')
        if self.balance is not None and not self.is_constant:
            raise ValueError(
                '`balance="speed"` divides a constant joint batch only: pass `joint_batch="constant"` too, and the '
                "size of the joint batch as that of the loader."
            )

        refuse_text(deterministic=self.deterministic)
        if self.deterministic and self.balance is not None:
            raise ValueError(
                '`deterministic=True` with `balance="speed"` cannot work: measured times would decide which samples '
                "make a shard. Omit one of the two."
            )

    @property
    def is_joint(self) -> bool:
        """True if the library divides joint batches of one size."""
        return self.is_constant or self.deterministic

    @property
    def is_constant(self) -> bool:
        """True if the joint batch does not depend on the number of workers."""
        return self.joint_batch == CONSTANT

    @property
    def joint_option(self) -> str:
        """The option by which the library divides joint batches, as users write it; empty where it does not."""
        if self.is_constant:
            return '`joint_batch="constant"`'
        return "`deterministic=True`" if self.deterministic else ""

    def joint_size(self, size: Any, num_workers: int) -> int:
        """Return how many samples a step has that is to have `size`, on so many workers."""
        if self.is_constant:
            return check_joint_size(size)
        return split_batch_size(size, self.num_shards if self.deterministic else num_workers).effective

    def of_worker(self, size: Any, num_workers: int) -> Any:
        """The most samples that a worker takes at once of batches that have such a size in its config."""
        if not self.is_constant or not is_integer(size):
            return size
        return min(-(-size // num_workers), self.max_batch_per_worker or size)

    def refuse_with(self, obstacles: Iterable[tuple[bool, str, str]]) -> None:
        """Refuses a constant joint batch where workers cannot divide one.

        Args:
            obstacles: Of each, whether it applies, the argument that asks for it, and what to do instead.

        Raises:
            ValueError: One applies.
        """
        for applies, what, way_out in obstacles:
            if self.is_joint and applies:
                raise ValueError(f"{self.joint_option} cannot work with {what}: {way_out}.")

    def config_for(self, config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
        """The config that an operator is passed, one of so many.

        Raises:
            ValueError: The batch size in it is no size, or cannot be divided.
        """
        if not self.is_constant:
            return config_for_worker(config, self.num_shards if self.deterministic else num_workers)
        if BATCH_SIZE in config:
            check_joint_size(config[BATCH_SIZE])
        return with_entries(config)
