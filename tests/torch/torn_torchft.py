"""One process of a training with torchft, which leaves a trail. Runs in torchft's environment, without raysgd.

A batch that torchft discards is noted as failed: its samples are in no weights, and do not come again.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from _torchft import ReplicaGroup
from torch.utils.data import TensorDataset

from tests.helpers.trail import BETWEEN, IN_EXCHANGE, Trail

NUM_GROUPS, NUM_FEATURES, STEP_S = 3, 3, 0.005


def main(folder: str) -> None:
    """Trains until the trail says that it is over."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(NUM_FEATURES, 1), torch.nn.Tanh(), torch.nn.Linear(1, 1)
    model, trail = torch.nn.Sequential(*layers), Trail(folder)
    group = ReplicaGroup("torchft_tuned", model, torch.optim.Adam(model.parameters()), folder, NUM_GROUPS)
    features = torch.randn(720, NUM_FEATURES)
    num_changes, num_members = 0, NUM_GROUPS
    for inputs, targets in group.batches(TensorDataset(features, features.sum(1, keepdim=True)), 4):
        time.sleep(STEP_S)
        trail.at(IN_EXCHANGE)
        counts = group.step(lambda: torch.nn.functional.mse_loss(model(inputs), targets))  # noqa: B023 - called at once
        num_changes += group.num_participants != num_members
        num_members = group.num_participants
        if counts:
            trail.step(num_changes)
        else:
            trail.fail(num_changes)
        trail.at(BETWEEN)
        if trail.last_pass < float("inf"):
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
