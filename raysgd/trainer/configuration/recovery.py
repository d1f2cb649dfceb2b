"""`Recovery`: how to handle worker failures, timeouts, and the snapshots to restart from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raysgd.core import arguments as checks
from raysgd.core.engine.shared.interface import EverySeconds


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Options for worker failures, for timeouts, and for the snapshots to restart from.

    Pass it as `recovery` to `TorchTrainer` or `TFTrainer`.

    Args:
        in_place: True: the workers that survive a failure keep their processes and continue the call, if possible; see
            `docs/fault-tolerance.md`. If that is not possible, or if False, all workers restart from the last snapshot.
        wait_for_workers: Whether the workers that survive a failure wait for new workers, which start immediately.
            True: they wait up to 30 s. False: they never wait. "auto": they wait only if the global batch would shrink
            without new workers, or if they lack the memory for larger parts of each batch. With `BATCH_SIZE` or
            `split_batches=True`, the global batch does not shrink. If they do not wait, new workers join during the
            epoch.
        resize_interval_s: How often a trainer with too few workers checks for free resources during an epoch. None:
            only before each call. If `wait_for_workers` is "auto" and the size of the global batch depends on the
            number of workers, the trainer never checks during an epoch.
        heartbeat_s: A worker process that does not respond for this many seconds, because it is stopped or frozen,
            counts as lost. A worker that is still starting has at least 120 s to respond.
        form_timeout_s: Time limit for connecting all workers of a group with each other once they are ready. The
            trainer's `timeout_s` is an upper limit.
        settle_timeout_s: Time limit for a surviving worker to finish its step after a failure, and for a spare worker
            that runs a validation to finish its batch. A worker that takes longer is replaced.
        snapshot_every_s: How often to take a snapshot (a copy of the state to restart from) after a call. "auto":
            snapshots take at most 2 % of the time, but one is taken anyway once a restart would have to repeat more
            than 30 s of completed calls; with `use_local=True`, after each call. A number: at most once in that many
            seconds; 0: after each call. None: never; a failure that needs a snapshot then raises `WorkersLostError`.
        snapshot_every_n_steps: Number of steps between snapshots inside an epoch. None: only after calls. The driver
            collects snapshots four times a second, so choose a number of steps that takes a second or more.
        undo: What workers copy before each batch, so that they can repeat the batch if a failure interrupts it. None:
            model buffers always, and the state of all registered objects if needed; see `docs/recovery.md`. True: the
            state of all registered objects; only for `TorchTrainer`. False: nothing. The call then restarts from the
            last snapshot if a failure interrupts a batch.

    Raises:
        ValueError: A value is invalid.

    Examples:
        >>> from raysgd import Recovery
        >>> options = {"num_workers": 2, "recovery": Recovery(heartbeat_s=10.0)}
    """

    in_place: bool = True
    wait_for_workers: bool | Literal["auto"] = "auto"
    resize_interval_s: float | None = 60.0
    heartbeat_s: float = 30.0
    form_timeout_s: float = 120.0
    settle_timeout_s: float = 120.0
    snapshot_every_s: EverySeconds = "auto"
    snapshot_every_n_steps: int | None = None
    undo: bool | None = None

    def __post_init__(self) -> None:
        checks.check_switch("in_place", self.in_place)
        checks.check_switch("wait_for_workers", self.wait_for_workers, "auto")
        if self.resize_interval_s is not None:
            checks.check_seconds("resize_interval_s", self.resize_interval_s, may_be_least=False)
        checks.check_seconds("heartbeat_s", self.heartbeat_s, checks.MIN_HEARTBEAT_S)
        for name in ("form_timeout_s", "settle_timeout_s"):
            checks.check_seconds(name, getattr(self, name), may_be_least=False)
        checks.check_auto_seconds("snapshot_every_s", self.snapshot_every_s, "no snapshots")
        if self.snapshot_every_n_steps is not None:
            hint = "None copies the state between calls only."
            checks.check_count("snapshot_every_n_steps", self.snapshot_every_n_steps, hint)
        checks.check_switch("undo", self.undo, None)
