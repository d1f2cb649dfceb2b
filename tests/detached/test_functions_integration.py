"""A detached `raysgd.train.Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detached.programs import Program, address_of_ray
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


@pytest.fixture
def address(ray_cluster: None) -> Iterator[str]:
    with address_of_ray() as address:
        yield address


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
