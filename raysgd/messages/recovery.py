"""`Recovery`: what follows the failure of a worker, limits of time, and snapshots to restart from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raysgd import _arguments as checks
from raysgd.engine.shared.group_spec import EverySeconds


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The rules for the failure of a worker: who waits for whom, limits of time, and snapshots to restart from.

    Pass it as `recovery` to `TorchTrainer` or `TFTrainer`.

    Args:
        in_place: Whether the survivors keep their processes and continue where they are, if that can be done; see
            `docs/fault-tolerance.md`. Else, and with False, all workers restart from the last snapshot.
        wait_for_workers: Whether survivors wait for new workers, which are started at once. "auto": not where the
            global batch does not depend on the number of workers (`BATCH_SIZE`, `split_batches=True`) and memory is
            free for their larger shares; the new ones join during the epoch.
        resize_interval_s: How often fewer workers than wanted look for room to grow, during an epoch, once a new
            worker could not be had. None: between calls only.
        heartbeat_s: A worker process that gives no sign of life for so long, because it is stopped or frozen, is lost;
            while it is made ready it gets at least 120 s.
        form_timeout_s: How long workers may take to form a group; never longer than `timeout_s`. All are there already,
            and ready.
        settle_timeout_s: How long a survivor of a failure may take to finish the step that it is in; then it
            is replaced.
        snapshot_every_s: After which calls the workers copy their state, for the failures that need a snapshot. "auto":
            so rarely that copies take at most 2 % of the time, but before a failure would repeat more than 30 s of
            calls. A number: after calls that end so many seconds after the last copy; 0: after each call. None: never;
            a failure that needs a snapshot then ends the trainer.
        snapshot_every_n_steps: How often to copy the state inside an epoch, for the failures that need a snapshot.
            None: only after calls. The driver collects copies four times a second: choose a number of steps that take a
            second or more.
        undo: Whether workers copy what a batch may change before the batch, to repeat it after a failure in the middle.
            None: buffers always, everything where it is needed. True: everything, before each batch; with
            `TorchTrainer`. False: nothing; a failure in the middle of a batch restarts the call from the snapshot.

    Raises:
        ValueError: A value cannot work.

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
