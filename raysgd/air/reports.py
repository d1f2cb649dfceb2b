"""What functions say with a report, and what the driver answers to their questions: names of `ray.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.air.checkpoint import Checkpoint


class CheckpointUploadMode(Enum):
    """How `report` stores a checkpoint.

    `SYNC` returns when a folder is stored, `ASYNC` at once. A dict is copied and travels while the function goes on, in
    either mode.
    """

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for; both are the same here, where nothing is validated in between."""

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(Enum):
    """How far a checkpoint is: only complete ones are listed."""

    COMMITTED = "COMMITTED"


@dataclass
class ReportedCheckpoint:
    """A checkpoint of the run, and what rank 0 reported with it."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes with workers that are about to be taken away.

    Attributes:
        deadline_ms: The earliest time at which one goes, in milliseconds of Unix time; None if Ray was told none.
        preempted_node_to_ranks: The ranks on each of them, by the ids of the nodes.
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The nodes, in order."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks on all of them, in order."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


@dataclass(frozen=True)
class UploadOptions:
    """What a report says of its checkpoint beside the checkpoint itself, as Ray's `report` takes it.

    Raises:
        ValueError: Something that is not done here.
    """

    checkpoint_dir_name: str | None = None
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    delete_local_checkpoint_after_upload: bool | None = None
    checkpoint_upload_fn: Any = None
    validation: Any = False

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint_upload_mode, CheckpointUploadMode):
            raise ValueError(
                f"`checkpoint_upload_mode={self.checkpoint_upload_mode!r}`: need a "
                "`raysgd.train.CheckpointUploadMode`: `SYNC` or `ASYNC`. That of Ray has the same name, but is another "
                "class."
            )
        for name, advice in _NOT_DONE.items():
            if (value := getattr(self, name)) not in (None, False, *_DONE):
                raise ValueError(f"`{name}={value!r}`: {advice}")

    @property
    def is_async(self) -> bool:
        """Whether the function goes on while the checkpoint is stored."""
        return self.checkpoint_upload_mode is CheckpointUploadMode.ASYNC

    @property
    def deletes(self) -> bool:
        """Whether the function's own folder is deleted when it is stored."""
        given = self.delete_local_checkpoint_after_upload
        return self.is_async if given is None else given


_DONE = (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC)
_NOT_DONE: Mapping[str, str] = {
    "checkpoint_dir_name": "checkpoints are numbered, and a run goes on from the highest number. Put the name into the "
    "metrics, or into the checkpoint with `set_metadata`.",
    "checkpoint_upload_mode": "a checkpoint that is not stored in the folder of the run cannot be restored, and is not "
    "counted by `num_to_keep`. Use `SYNC` or `ASYNC`; a folder in the same store is copied by the worker.",
    "checkpoint_upload_fn": "workers store checkpoints themselves. For another store pass "
    "`RunConfig(storage_path=..., storage_filesystem=...)`.",
    "validation": "validate in the function before you report, and report what you find.",
}
