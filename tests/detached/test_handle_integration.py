"""A detached trainer is used as one in the program is: results, errors, Ctrl-C, output, turns, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd import TorchTrainer
from raysgd.torch.checkpoints import checkpoint_file
from tests.detached.programs import OPERATOR, Program
from tests.helpers.processes import is_alive, wait_until


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer") / "log"


@pytest.fixture(scope="module")
def program(address: str, log: Path) -> Iterator[Program]:
    """A program with a trainer of one worker, for all tests."""
    with Program(address) as program:
        program.run(OPERATOR)
        program.run(f"trainer = make({str(log)!r}, num_workers=1); trainer.train()")
        yield program
        program.run("trainer.shutdown()")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(private_temp_dir: Path) -> None:
    """The trainer of this module lives longer than a test; the last one looks for what is left."""


def test_results_are_those_of_a_trainer(program: Program) -> None:
    assert program.run("trainer.num_workers, trainer.max_replicas, trainer.config['num_samples']") == [1, 1, 40]
    assert program.run("len(trainer.history), trainer.use_gpu, trainer.recovery.in_place") == [1, False, True]
    assert "1 of 1" in program.run("str(trainer.status())")
    assert program.run("type(trainer.get_model()).__name__") == "Linear"
    assert "of Counting" in program.run("repr(trainer)")
    assert program.run("trainer._repr_html_()").startswith("<")
    assert program.run("trainer.predict(torch.zeros(3, 1)).shape[0]") == 3


def test_notebooks_complete_its_names_and_show_their_help(program: Program) -> None:
    names = program.run("dir(trainer)")
    assert {"train", "history", "pending", "shutdown"} <= set(names)
    assert "worker_group" not in names
    text = program.run("trainer.validate.__doc__")
    assert text.startswith("validate(num_steps")
    assert str(TorchTrainer.validate.__doc__).partition("\n")[0] in text
    assert program.run("trainer.status.__doc__").startswith("status(")
    found = program.fail("trainer.note = 'mine'")
    assert "AttributeError" in found["error"]
    assert "it would stay in this program" in found["text"]


def test_iterators_are_drawn_from_call_by_call(program: Program) -> None:
    epochs = program.run("[row['epoch'] for row in trainer.epochs(2)]")
    assert epochs == [epochs[0], epochs[0] + 1]
    drawn = "rows = trainer.epochs(5); first = next(rows)['epoch']; rows.close(); first"
    assert program.run(drawn) == epochs[1] + 1
    assert program.run("trainer.train()['epoch']") == epochs[1] + 2
    batches = "[len(batch) for batch in trainer.predict(torch.zeros(5, 1), batch_size=2, streaming=True)]"
    assert program.run(batches) == [2, 2, 1]


def test_a_call_runs_while_the_program_goes_on(program: Program) -> None:
    before = program.run("trainer.train()['epoch']")
    program.run("call = trainer.train(blocking=False)")
    assert program.run("trainer.validate()['num_samples'] > 0, call.done()") == [True, True]  # it had its turn before
    assert program.run("call.result(60)['epoch'], call.result()['epoch']") == [before + 1] * 2


def test_a_program_whose_ray_session_has_ended_attaches_again(program: Program, address: str) -> None:
    with Program(address) as other:
        other.run("import ray, raysgd; trainer = raysgd.attach('run'); rows = trainer.epochs(5); next(rows)")
        other.run("ray.shutdown()")
        assert other.run("repr(trainer), trainer._repr_html_()") == ["<detached run: its Ray session has ended>", None]
        for use in ("trainer.train()", "trainer.status()", "trainer.num_workers", "next(rows)"):
            assert "`raysgd.attach('run')`" in other.fail(use)["text"]
        other.run("trainer.shutdown(); del rows, trainer")
        assert other.run("ray.is_initialized()") is False
        assert other.run("raysgd.attach('run').num_workers") == 1


def test_a_trainer_whose_ray_session_has_ended_calls_into_no_other(address: str, log: Path) -> None:
    with Program(address) as other:
        other.run(OPERATOR)
        made = f"make({str(log)!r}, detached=None, num_workers=2)"
        other.run(f"import gc, ray, weakref; from raysgd import train; trainer, left = {made}, {made}")
        assert other.run("[len(each.status().workers) for each in (trainer, left)]") == [0, 2]  # it gave way
        other.run("functions = train.Trainer('torch', num_workers=1); functions.start(); ray.shutdown()")
        for again in ("0", "ray.init(); 1"):
            other.run(again)
            for use in (
                "trainer.train()",
                "trainer.get_model()",
                "trainer.predict(torch.zeros(2, 1))",
                "trainer.state_dict()",
                "functions.run(lambda: None)",
            ):
                assert "The Ray session of this trainer has ended" in other.fail(use)["text"]
            assert "its Ray session has ended" in other.run("str(trainer.status())")
            assert other.run("ray.is_initialized()") is again.endswith("1")
        other.run("trainer.shutdown(); functions.shutdown()")
        assert other.run("gc.disable(); seen = weakref.ref(left); del left; seen() is None")  # no cycle holds it
        for _ in range(2):  # the one before gives its room back, as nothing refers to it any more
            other.run("functions = train.Trainer('torch', num_workers=3); functions.start()")
        other.run("functions.shutdown()")


def test_errors_have_the_class_of_the_user_and_the_line(program: Program) -> None:
    found = program.fail("trainer.apply_all_workers(lambda: {}['of the user'])")
    assert {"KeyError", "WorkerError"} <= set(found["error"])
    assert "of the user" in found["text"]
    found = program.fail("trainer.train(max_retries=-1)")
    assert "InvalidCountError" in found["error"]
    assert "DetachedTraceback" not in found["text"]
    program.run(
        "class Failing(raysgd.callbacks.Callback):\n"
        "    def on_result(self, run, result):\n"
        "        raise OSError('in a callback')\n"
    )
    found = program.fail("trainer.fit(1, callbacks=[Failing()])")
    assert "CallbackError" in found["error"]
    assert "in on_result" in found["text"]
    assert "OSError: in a callback" in found["text"]


def test_what_it_prints_and_logs_appears_in_the_program(program: Program) -> None:
    program.run(
        "class Printing(raysgd.callbacks.Callback):\n"
        "    def on_result(self, run, result):\n"
        "        import sys, logging\n"
        "        print('to the output'); print('to the errors', file=sys.stderr)\n"
        "        logging.getLogger('raysgd.x').warning('to the log')\n"
    )
    program.begin("trainer.fit(1, callbacks=[Printing()]).dataframe is None")
    printed = program.found()["printed"]
    assert "to the output\n" in printed
    assert "to the errors\n" in printed
    assert "raysgd WARNING: to the log" in printed
    program.begin("trainer.validate()['num_samples']")
    assert program.found()["printed"] == ""


def test_ctrl_c_ends_the_call_and_not_the_trainer(program: Program, log: Path) -> None:
    program.run("slow = trainer.apply_all_operators(pace(0.2))")
    size, gate = log.stat().st_size, Path(f"{log}.wait")
    gate.touch()  # no step ends while it is there
    program.begin("trainer.train()")
    wait_until(lambda: log.stat().st_size > size)
    program.interrupt()
    gate.unlink()
    found = program.found()
    assert found["error"][0] == "KeyboardInterrupt", found["text"]
    program.run("fast = trainer.apply_all_operators(pace(0.0))")
    assert program.run("trainer.validate()['num_samples']") == 40


OPENS_ONCE_TOLD = """
import os, raysgd, sys, threading, time

def open_once_told(gate, printed):
    while "is busy" not in printed.getvalue():
        time.sleep(0.01)
    os.unlink(gate)
"""


def test_calls_of_two_programs_take_turns_and_the_second_is_told(program: Program, address: str, log: Path) -> None:
    with Program(address) as other:
        other.run(f"{OPENS_ONCE_TOLD}\ntrainer = raysgd.attach('run')")
        size, gate = log.stat().st_size, Path(f"{log}.wait")
        gate.touch()  # no step ends while it is there
        program.begin("trainer.train()['num_samples']")
        wait_until(lambda: log.stat().st_size > size)
        opens = f"threading.Thread(target=open_once_told, args=({str(gate)!r}, sys.stdout)).start()"
        other.begin(f"{opens}\ntrainer.validate()['num_samples']")
        second, first = other.found(), program.found()
        assert [first["value"], second["value"]] == [40, 40]
        assert "detached trainer `run` is busy: `train` of" in second["printed"]
        assert other.run("len(raysgd.detached_trainers()[0].programs)") == 2
        assert other.run("trainer.pending()") is None
        other.run("del trainer")
        assert program.run("len(raysgd.detached_trainers()[0].programs)") == 1


def test_what_cannot_work_is_refused(program: Program) -> None:
    found = program.fail(f"make({'log'!r})")
    assert "ValueError" in found["error"]
    assert 'raysgd.attach("run")' in found["text"]
    assert "replace=True" in found["text"]
    found = program.fail("raysgd.attach('unknown')")
    assert "LookupError" in found["error"]
    assert "There are: `run`." in found["text"]
    found = program.fail("import threading; trainer.fit(1, callbacks=[raysgd.callbacks.CSVLogger(), threading.Lock()])")
    assert "UnpicklableError" in found["error"]
    assert "`callbacks[1]` cannot be sent to the trainer" in found["text"]
    assert "apply_all_workers" in program.fail("trainer.worker_group")["text"]
    assert "no attribute `run_it`" in program.fail("trainer.run_it()")["text"]
    assert "use_local" in program.fail("make('log', 'other', num_workers=1, use_local=True)")["text"]
    version = "import raysgd.detached.cluster as c; c.__version__ = '9.9'"
    found = program.fail(f"{version}\ntry:\n    raysgd.attach('run')\nfinally:\n    c.__version__ = raysgd.__version__")
    assert "this program 9.9" in found["text"]
    assert program.run("[each.name for each in raysgd.detached_trainers()]") == ["run"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", None, 7])
def test_a_name_that_is_no_file_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"`detached=.*`: need a name of letters"):
        raysgd.Detached(name)


def test_a_ray_that_would_end_with_the_program_is_refused(ray_cluster: None) -> None:
    with pytest.raises(RuntimeError, match="ray start --head"):
        TorchTrainer(training_operator_cls=raysgd.TrainingOperator, detached="refused")


def test_an_argument_that_is_wrong_leaves_no_process(program: Program) -> None:
    found = program.fail("make('log', 'wrong', num_workers=0)")
    assert "ValueError" in found["error"]
    found = program.fail("make('log', 'wrong', config={'num_samples': 'many'})")
    assert "TypeError" in found["error"]
    found = program.fail("make('log', raysgd.Detached('wrong', folder='/proc/none'))")
    assert "OSError" in found["error"]
    assert "/proc/none" in found["text"]
    assert program.run("[each.name for each in raysgd.detached_trainers()]") == ["run"]


def test_a_name_that_another_program_has_just_taken_is_refused_as_others_are(program: Program) -> None:
    usual = program.fail("make('log', 'run')")
    program.run("import raysgd.detached.cluster as c; usual, calls = c._check_free, []")
    program.run("c._check_free = lambda name: usual(name) if calls else calls.append(name)")
    found = program.fail("make('log', 'run')")  # the look at the names came too early
    program.run("c._check_free = usual")
    message = 'ValueError: `detached="run"`: there is a trainer of this name. Go on with it by'
    assert message in usual["text"]
    assert (found["error"], message in found["text"]) == (usual["error"], True)


def test_a_detached_trainer_is_replaced_and_with_ends_one(program: Program, log: Path) -> None:
    program.run(f"import os; old = pids(make({str(log)!r}, 'second', num_workers=1))")
    replaced = (
        f"new = make({str(log)!r}, raysgd.Detached('second', replace=True), num_workers=1)\n"
        "with new: ids, call = pids(new), new.train(blocking=False)\n"
    )
    assert program.run(f"{replaced}ids != old, [each.name for each in raysgd.detached_trainers()]") == [True, ["run"]]
    assert "TrainerShutdownError" in program.fail("new.train()")["error"]
    assert program.run("repr(call), new._repr_html_()") == ["<train of <detached second: ended>>", None]


def test_the_command_line_lists_follows_and_stops(program: Program, log: Path) -> None:
    program.run(f"second = make({str(log)!r}, 'second', num_workers=1)")
    listed = program.run("shell('list').stdout")
    assert "second: <TorchTrainer of Counting" in listed
    assert "No call is running" in program.run("shell('attach', 'second').stdout")
    assert "There is no detached trainer `third`" in program.run("shell('stop', 'third').stderr")
    pid = program.run("import ray; ray.get(second._actor.describe.remote())['pid']")
    os.kill(pid, signal.SIGSTOP)
    program.run("import raysgd.detached.cluster as c; usual, c.ANSWER_S = c.ANSWER_S, 1.0")
    listed = program.run("[str(each) for each in raysgd.detached_trainers() if each.name == 'second']")
    assert listed == ["second: not answering; `raysgd stop second --force` ends it"]
    found = program.fail("raysgd.attach('second')")
    program.run("c.ANSWER_S = usual")
    assert "TrainerLostError" in found["error"]
    assert "Detached trainer `second` is not answering" in found["text"]
    assert program.run("shell('stop', 'second', '--force').stdout") == "Detached trainer second has ended.\n"
    while is_alive(pid):
        time.sleep(0.05)
    assert "TrainerLostError" in program.fail("second.train()")["error"]
    assert program.run("[each.name for each in raysgd.detached_trainers()]") == ["run"]


def test_a_trainer_with_a_folder_is_saved_before_the_command_line_stops_it(
    program: Program, log: Path, tmp_path: Path
) -> None:
    place = f"raysgd.Detached('second', folder={str(tmp_path)!r})"
    program.run(f"second = make({str(log)!r}, {place}, num_workers=1); second.train()")
    file = tmp_path / "second.pt"
    assert program.run("shell('stop', 'second').stdout") == f"Detached trainer second has ended, saved as {file}.\n"
    assert checkpoint_file.read(file)["epoch"] == 1
    assert "stopped: `raysgd stop` has ended" in program.run(f"shell('status', {str(tmp_path)!r}).stdout")


def test_a_trainer_that_is_in_a_call_is_stopped_without_being_saved(
    program: Program, log: Path, tmp_path: Path
) -> None:
    place = f"raysgd.Detached('second', folder={str(tmp_path)!r})"
    program.run(f"second = make({str(log)!r}, {place}, num_workers=1, config={{'step_s': 1.0}})")
    program.run("call = second.train(blocking=False)")
    assert "second has ended, not saved, because it was running `train` of" in program.run(
        "shell('stop', 'second').stdout"
    )
    assert not (tmp_path / "second.pt").exists()


def test_a_trainer_that_cannot_be_saved_is_not_stopped(program: Program, log: Path, tmp_path: Path) -> None:
    place = f"raysgd.Detached('second', folder={str(tmp_path / 'away')!r})"
    program.run(f"second = make({str(log)!r}, {place}, num_workers=1); second.train()")
    (tmp_path / "away").rmdir()
    (tmp_path / "away").touch()
    assert "Error: " in program.run("shell('stop', 'second').stderr")
    assert program.run("second.train()['epoch']") == 2
    assert program.run("shell('stop', 'second', '--force').stdout") == "Detached trainer second has ended.\n"


SLOW = """
def slow(path, fails):
    def hook():
        while os.path.exists(path):
            time.sleep(0.01)
        if fails:
            raise ValueError("no data")
    return hook
"""


@pytest.mark.parametrize("fails", [False, True])
def test_what_made_the_trainer_is_no_call_that_is_pending_unless_it_has_failed(
    fails: bool, program: Program, address: str, log: Path, tmp_path: Path
) -> None:
    waits = tmp_path / "waits"
    waits.touch()
    with Program(address) as maker:
        maker.run(f"{OPERATOR}{SLOW}")
        hook = f"slow({str(waits)!r}, {fails})"
        maker.begin(f"make({str(log)!r}, 'second', num_workers=1, initialization_hook={hook})")
        while "running `start`" not in program.run("str([*map(str, raysgd.detached_trainers())])"):
            time.sleep(0.05)
    program.begin("second = raysgd.attach('second'); call = second.pending(); call and call.method")
    time.sleep(0.5)
    waits.unlink()
    assert program.found()["value"] == ("start" if fails else None)
    if fails:
        assert "no data" in program.fail("call.result()")["text"]
    else:
        assert program.run("second.train()['epoch'], second.pending()") == [1, None]
    program.run("second.shutdown()")


def test_calls_with_the_same_data_go_on_where_the_last_one_stopped(program: Program, log: Path) -> None:
    samples = "[(torch.tensor([float(number)]), torch.tensor([0.0])) for number in range(12)]"
    program.run(f"data, other = (DataLoader({samples}, batch_size=2) for _ in range(2))")
    num_before = len(log.read_text().splitlines())
    for given in ("data", "data", "other"):
        program.run(f"trainer.train(num_steps=3, dataset={given})")
    batches = [json.loads(line.split(" ", 4)[4]) for line in log.read_text().splitlines()[num_before:]]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [0, 1], [2, 3], [4, 5]]
