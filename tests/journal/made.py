"""Lines of a journal for tests: those of a run with one worker on a dataset of 20 samples."""

from __future__ import annotations

from typing import Any, cast

from raysgd.journal.entries import Leg, RunLine, read_line

HEADER: dict[str, Any] = {
    "raysgd": "0.1.0",
    "config": {},
    "config_left_out": [],
    "options": {
        "use_gpu": False,
        "batch_options": {
            "split_batches": False,
            "micro_batch_size": None,
            "deterministic": False,
            "num_shards": 1,
        },
        "scheduler_step_freq": None,
        "use_fp16": False,
        "precision": None,
        "strategy": "ddp",
        "use_horovod": False,
        "add_dist_sampler": True,
        "step_options": {
            "accumulate_grad_batches": 1,
            "clip_grad_norm": None,
            "clip_grad_value": None,
            "sync_batchnorm": False,
            "compile": False,
            "activation_checkpointing": False,
        },
        "seed": None,
    },
    "epochs": 3,
    "validation_freq": 1,
    "has_dataset": False,
}
DATA: dict[str, Any] = {
    "kind": "loader",
    "order": "sequential",
    "seed": 0,
    "num_samples": 20,
    "is_of_batches": False,
    "batch_size": 4,
    "drop_last": False,
    "rule": {"cap": None, "num_shards": 0, "multiple": 1},
}


def leg_line(step: int = 0, **entries: Any) -> dict[str, Any]:
    """Return the line of a leg that begins after a step, without `kind`."""
    line = {"step": step, "pass": 0, "consumed": 0, "num_workers": 1, "attempt": [1, 1], "window": 1}
    return {**line, "is_of_call": False, "data": DATA, "obstacle": None, **entries}


def made_leg(num_workers: int = 1, window: int = 1, **options: Any) -> Leg:
    """Return a leg of a run with these options, as a journal has it."""
    run = read_line({"kind": "run", **HEADER, "options": {**HEADER["options"], **options}}, None)
    line = {"kind": "leg", **leg_line(num_workers=num_workers, window=window)}
    return cast("Leg", read_line(line, cast("RunLine", run)))
