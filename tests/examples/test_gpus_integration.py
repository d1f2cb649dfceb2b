"""Programs start as they stand on machines with no, one and two GPUs. `on_gpus.py` says how, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.examples.on_gpus import ROOT
from tests.helpers.forked import Forks, NoForks, to_lend

pytestmark = [pytest.mark.integration, pytest.mark.program]

BY_CLUSTER = [
    "examples/transformers_trainer.py",  # before `image_folder.py`, with whose torchvision transformers do not load
    "README.md",
    "docs/tutorial.md",
    *(f"examples/{name}.py" for name in ("gan", "image_folder", "lora", "parquet_stream", "predict_folder", "spot")),
    "examples/text_classification.py",
    "functions",
    "fit",
    "keras",
]
"""Programs that go by the GPUs of the cluster: two workers each."""

ON_CPUS = {"examples/keras_callbacks.py": 2, "examples/survive.py": 4, "examples/notebook.ipynb": 2, "doctor": 2}
"""Programs that ask for no GPUs, with the number of their workers."""


SHARES = {0: 0.0, 1: 0.5, 2: 1.0}
"""Of a GPU that each of two workers gets, by how many there are."""


@pytest.mark.timeout(600)
def test_every_program_starts_with_the_gpus_that_are_there(worker_forks: Forks | NoForks) -> None:
    """In one process, which imports all frameworks."""
    command = [sys.executable, "-m", "tests.examples.on_gpus", ",".join(map(str, SHARES)), *BY_CLUSTER, *ON_CPUS]
    environment = {**os.environ, **to_lend()}
    environment.pop("RAY_ADDRESS", None)
    environment |= {"SGD_PLACEMENT_GROUP_TIMEOUT_S": "30", "TRAIN_PLACEMENT_GROUP_TIMEOUT_S": "30"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"num_gpus"')]
    found = {
        (line["num_gpus"], line["name"]): (
            line.get("workers"),
            line.get("bundle", {}).get("GPU", 0),
            line.get("error"),
        )
        for line in lines
    }
    expected = {(num_gpus, name): (2, share, None) for num_gpus, share in SHARES.items() for name in BY_CLUSTER}
    expected |= {(num_gpus, name): (number, 0, None) for num_gpus in SHARES for name, number in ON_CPUS.items()}
    assert found == expected, done.stderr[-2000:]
    assert done.stderr.count("2 workers share 1 GPU(s)") == len(BY_CLUSTER)
