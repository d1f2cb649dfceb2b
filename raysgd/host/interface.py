"""The names of trainers that do not go to the host as a call in its turn, or as a look at an attribute.

All other public names are looked up in the class of the trainer, in the host, so that a new option needs nothing here.
"""

from __future__ import annotations

BESIDE = ("ledger", "status")
"""The methods that are called beside a call that runs."""

MAY_GO_ON = ("train", "validate")
"""The calls that return a handle with `blocking=False`."""

_IN_HOST = "it stays in the host's process, and cannot be sent."
STAYS_THERE: dict[str, str] = {
    "worker_group": f"{_IN_HOST} Use `apply_all_workers(fn)`.",
    "take_state_of": "two trainers would have to be in one process. Use `save` and `load`.",
    "as_trainable": "Ray Tune makes the trainers. Call it on the class.",
    "can_restore": "call it on the class.",
    "checkpoint_manager": f"{_IN_HOST} Use `best_checkpoint` and `latest_checkpoint`.",
    "is_started": "`raysgd.hosts()` lists the trainers that run in hosts.",
    "preprocess_datasets": "`fit` calls it.",
    "run_iterator": f"{_IN_HOST} Use `run`, which continues without your program.",
    "setup": "`fit` calls it.",
    "to_tune_trainable": "Ray Tune makes the trainers. Call it on a trainer without a host.",
    "to_worker_group": f"{_IN_HOST} Make the trainer without a host.",
    "training_loop": "`fit` calls it.",
}
"""The names that a handle refuses, with the reason and what to do instead. `shutdown` is the handle's own."""
