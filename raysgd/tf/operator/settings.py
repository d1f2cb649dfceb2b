"""Settings that `TFTrainer` sends to its replicas: checked once, in the driver, and passed on whole."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd._arguments import check_seed
from raysgd.messages.settings import ReplicaSettings


@dataclass(frozen=True)
class TFSettings(ReplicaSettings):
    """The settings that every replica is made from. The docstring of `TFTrainer` says what each field means.

    Attributes:
        num_workers: How many there are meant to be; None: as many as there are when the replica is made.

    Raises:
        ValueError: A value cannot work.
    """

    seed: int
    verbose: bool | int | str = False
    num_workers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.verbose, str | bytes) and self.verbose != "auto":
            raise ValueError(f'`verbose={self.verbose!r}`: allowed are True, False, 0, 1, 2 and "auto".')
        check_seed(self.seed)
