"""Functions that a signal to the driver ends. They run in workers, which import this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from raysgd import train
from raysgd.air import Checkpoint


def note(config: dict[str, Any], **told: Any) -> None:
    """Write a line into the file of this rank."""
    with open(Path(config["folder"], f"rank_{train.world_rank()}"), "a") as file:
        file.write(" ".join(f"{name}={value}" for name, value in told.items()) + "\n")


def notes(folder: Path, rank: int, name: str) -> list[str]:
    """Return what a rank has noted under a name, in order."""
    lines = [line.partition("=") for line in (folder / f"rank_{rank}").read_text().splitlines()]
    return [value for found, _, value in lines if found == name]


def train_in_steps(config: dict[str, Any]) -> str:
    """Take steps from where it was left; save every few, and where the program is about to end."""
    checkpoint = train.load_checkpoint()
    for step in range(0 if checkpoint is None else checkpoint["step"] + 1, config["num_steps"]):
        time.sleep(config.get("step_s", 0.05))
        note(config, step=step)
        train.report(step=step)
        info = train.get_preemption_info() if config.get("asks") else None
        if info is not None:
            is_soon = 0 < info.deadline_ms / 1000 - time.time() < 31
            note(config, info=(info.preempted_ranks, is_soon))
        if info is not None or (step + 1) % config["save_every"] == 0:
            train.save_checkpoint(step=step, loss=float(step))
        if info is not None:
            return "early"
    return "done"


def fit_in_steps(config: dict[str, Any]) -> None:
    """Do so in `fit`, with a report for each step."""
    checkpoint = train.get_checkpoint()
    first = 0 if checkpoint is None else checkpoint.to_dict()["step"] + 1
    for step in range(first, config["num_steps"]):
        time.sleep(config.get("step_s", 0.05))
        note(config, step=step)
        is_leaving = train.get_preemption_info() is not None
        if is_leaving and config.get("returns"):
            return
        saves = is_leaving or (step + 1) % config["save_every"] == 0
        train.report({"step": step}, checkpoint=Checkpoint.from_dict({"step": step}) if saves else None)
        if is_leaving:
            return


def die_beside_the_signal(config: dict[str, Any]) -> None:
    """Save one step; then rank 1 dies as soon as the program is about to end."""
    train.save_checkpoint(step=0)
    train.report(step=0)
    while train.get_preemption_info() is None:
        time.sleep(0.05)
    note(config, told=True)
    if train.world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
