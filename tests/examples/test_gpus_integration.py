"""Programs start as they stand on machines with no, one and two GPUs. `on_gpus.py` says how, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.examples.on_gpus import ROOT

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


@pytest.mark.parametrize(("num_gpus", "share"), [(0, 0.0), (1, 0.5), (2, 1.0)])
def test_every_program_starts_with_the_gpus_that_are_there(num_gpus: int, share: float) -> None:
    command = [sys.executable, "-m", "tests.examples.on_gpus", str(num_gpus), *BY_CLUSTER, *ON_CPUS]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"SGD_PLACEMENT_GROUP_TIMEOUT_S": "30", "TRAIN_PLACEMENT_GROUP_TIMEOUT_S": "30"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    found = {
        line["name"]: (line.get("workers"), line.get("bundle", {}).get("GPU", 0), line.get("error")) for line in lines
    }
    expected = {name: (2, share, None) for name in BY_CLUSTER}
    expected |= {name: (num_workers, 0, None) for name, num_workers in ON_CPUS.items()}
    assert found == expected, done.stderr[-2000:]
    assert done.stderr.count("2 workers share 1 GPU(s)") == (len(BY_CLUSTER) if num_gpus == 1 else 0)
