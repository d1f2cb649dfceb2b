"""A detached `TFTrainer` goes on when the program that made it is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detached.programs import Program, address_of_ray
from tests.helpers.processes import wait_until

CREATORS = """
import os, time, raysgd

def make_model(config):
    import keras
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model

def make_data(config):
    import numpy, tensorflow
    rows = numpy.zeros((8, 1), "float32")

    def noted(row):
        open(config["log"], "a").write("row\\n")
        while os.path.exists(config["log"] + ".wait"):
            time.sleep(0.01)
        return row

    data = tensorflow.data.Dataset.from_tensor_slices((rows, rows))
    data = data.map(lambda x, y: (tensorflow.ensure_shape(tensorflow.numpy_function(noted, [x], "float32"), (1,)), y))
    return data.batch(4), None
"""


@pytest.fixture
def address(ray_cluster: None, workers_have_tensorflow: None) -> Iterator[str]:
    with address_of_ray() as address:
        yield address


def test_an_epoch_goes_on_without_its_program(address: str, tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "log.wait"
    with Program(address) as program:
        program.run(CREATORS)
        made = f"make_model, make_data, config={{'log': {str(log)!r}}}, num_replicas=2, detached='keras'"
        program.run(f"trainer = raysgd.TFTrainer({made}); trainer.num_workers")
        gate.touch()
        program.begin("trainer.train()")
        wait_until(log.exists)
    gate.unlink()
    with Program(address) as program:
        program.run("import raysgd; trainer = raysgd.attach('keras')")
        assert program.run("'train_loss' in trainer.pending().result()")
        assert program.run("'train_loss' in trainer.train()")
        program.run("trainer.shutdown()")
