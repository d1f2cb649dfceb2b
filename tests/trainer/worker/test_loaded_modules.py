"""The modules that real workers have loaded after all kinds of calls: their half of the library, none of the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_layers import DRIVER

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
import ray, torch
from torch.utils.data import DataLoader, TensorDataset
from raysgd import TorchTrainer, TrainingOperator
from raysgd.train import Trainer, report as report_metrics, save_checkpoint


class Line(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(torch.ones(16, 2), torch.ones(16, 1)), 4)
        self.register_data(train_loader=loader, validation_loader=loader)


def loaded():
    return sorted(name for name in sys.modules if name.startswith("raysgd."))


def report():
    save_checkpoint(epoch=1)
    report_metrics(loss=1.0)
    return loaded()


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with TorchTrainer(training_operator_cls=Line, num_workers=2) as trainer:
    trainer.fit(2)
    trainer.predict(torch.ones(6, 2))
    trainer.save(sys.argv[1])
    trainer.load(sys.argv[1])
    print(json.dumps(trainer.apply_all_workers(loaded)[1]))
functions = Trainer(backend="torch", num_workers=2)
functions.start()
print(json.dumps(functions.run(report)[1]))
functions.shutdown()
"""


@pytest.mark.integration
@pytest.mark.program
def test_no_module_of_the_driver_is_loaded_in_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(tmp_path / "state.pt")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    of_class, of_function = map(json.loads, found.stdout.splitlines()[-2:])
    assert "raysgd.trainer.worker.runner" in of_class
    assert "raysgd.train._worker.function_replica" in of_function
    parts = tuple(f"{each}." for each in DRIVER)
    assert [name for name in {*of_class, *of_function} if f"{name}.".startswith(parts)] == []
