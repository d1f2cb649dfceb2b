"""Detached trainers of functions and of Keras models go on when the program that made them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.detached.programs import Program
from tests.helpers.processes import wait_until

FUNCTION = """
import os, time, raysgd
from raysgd import train

def count(config):
    for number in range(5):
        train.report({"number": number}) if config["is_fit"] else train.report(number=number)
        open(config["log"], "a").write(f"{number}\\n")
        while os.path.exists(config["log"] + ".wait"):
            time.sleep(0.01)
    return number
"""


def test_fit_goes_on_without_its_program_and_the_name_of_a_run_detaches_nothing(address: str, tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "log.wait"
    gate.touch()
    run = f"train.RunConfig(name='digits', storage_path={str(tmp_path / 'results')!r})"
    config = {"log": str(log), "is_fit": True}
    made = f"DataParallelTrainer(count, train_loop_config={config}, scaling_config=one, run_config={run}, **options)"
    with Program(address) as program:
        program.run(f"{FUNCTION}\nfrom raysgd.train.data_parallel_trainer import DataParallelTrainer")
        program.run(f"one = train.ScalingConfig(num_workers=1)\ndef make(**options): return {made}")
        assert program.run("type(make()).__name__, type(make(detached=None)).__name__") == ["DataParallelTrainer"] * 2
        assert program.run("raysgd.detached_trainers()") == []
        program.run("trainer = make(detached='fits')")
        program.begin("trainer.fit()")
        wait_until(log.exists)
    gate.unlink()
    with Program(address) as program:
        program.run("import raysgd; trainer = raysgd.attach('fits')")
        assert program.run("trainer.pending().result().metrics['number']") == 4
        program.run("trainer.shutdown()")
    assert (tmp_path / "results" / "digits").is_dir()


@pytest.mark.soak
def test_a_function_goes_on_without_its_program(address: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    gate = Path(f"{log}.wait")
    gate.touch()
    with Program(address) as program:
        program.run(FUNCTION)
        program.run(f"trainer = train.Trainer('torch', 2, logdir={str(tmp_path / 'runs')!r}, detached='functions')")
        program.run("trainer.start()")
        program.begin(f"trainer.run(count, {{'log': {str(log)!r}, 'is_fit': False}})")
        wait_until(log.exists)
    gate.unlink()
    with Program(address) as program:
        program.run("import raysgd; trainer = raysgd.attach('functions')")
        assert program.run("call = trainer.pending(); call.method, call.result()") == ["run", [4, 4]]
        assert program.run("trainer.latest_run_dir.name") == "run_001"
        assert "run" in program.fail("trainer.run_iterator(None)")["text"]
        program.run("trainer.shutdown()")
    assert sorted(log.read_text().split()) == sorted("0011223344")


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


@pytest.mark.usefixtures("workers_have_tensorflow")
def test_an_epoch_of_keras_goes_on_without_its_program(address: str, tmp_path: Path) -> None:
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
