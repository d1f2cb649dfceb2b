"""`Recovery`: limits of time for workers, and snapshots for the losses that need one."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd import _arguments as checks
from raysgd.engine.shared.group_spec import EverySeconds


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The rules for losses: signs that one happened, the time of survivors, and the snapshots to go back to.

    Pass it as `recovery_options` to `TorchTrainer` or `TFTrainer`.

    Args:
        heartbeat_s: A worker process that gives no sign of life for so long, because it is stopped or frozen, is lost;
            while it is made ready it gets at least 10 s.
        form_timeout_s: How long workers may take to form a group; never longer than `timeout_s`. All are there already,
            and ready.
        settle_timeout_s: How long a survivor of a loss may take to finish the step that it is in; then it
            is replaced.
        snapshot_every_s: After which calls the workers copy their state, for the losses that need a snapshot. "auto":
            so rarely that copies take at most 2 % of the time, but before a loss would repeat more than 30 s of calls.
            A number: after calls that end so many seconds after the last copy; 0: after each call. None: never; a loss
            that needs a snapshot then ends the trainer.
        snapshot_every_n_steps: How often to copy the state inside an epoch, for the losses that need a snapshot. None:
            only after calls. The driver collects copies four times a second: choose a number of steps that take a
            second or more.
        undo: Whether workers copy what a batch may change before the batch, to repeat it after a loss in the middle.
            None: buffers always, everything where it is needed. True: everything, before each batch; with
            `TorchTrainer`. False: nothing; a loss in the middle of a batch restarts the call from the snapshot.

    Raises:
        ValueError: A value cannot work.

    Examples:
        >>> from raysgd import Recovery
        >>> options = {"num_workers": 2, "recovery_options": Recovery(heartbeat_s=10.0)}
    """

    heartbeat_s: float = 30.0
    form_timeout_s: float = 120.0
    settle_timeout_s: float = 120.0
    snapshot_every_s: EverySeconds = "auto"
    snapshot_every_n_steps: int | None = None
    undo: bool | None = None

    def __post_init__(self) -> None:
        checks.check_seconds("heartbeat_s", self.heartbeat_s, checks.MIN_HEARTBEAT_S)
        for name in ("form_timeout_s", "settle_timeout_s"):
            checks.check_seconds(name, getattr(self, name), may_be_least=False)
        checks.check_auto_seconds("snapshot_every_s", self.snapshot_every_s, "no snapshots")
        if self.snapshot_every_n_steps is not None:
            hint = "None copies the state between calls only."
            checks.check_count("snapshot_every_n_steps", self.snapshot_every_n_steps, hint)
        if self.undo is not None and not isinstance(self.undo, bool):
            raise ValueError(f"`undo={self.undo!r}`: allowed are None (the default), True and False.")
