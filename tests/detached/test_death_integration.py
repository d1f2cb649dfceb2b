"""Programs with a detached trainer are killed, and other programs go on.

Covers `raysgd.detached.process`, `raysgd.detached.handle` and `raysgd.detached.cluster`, which need each other.
"""

from __future__ import annotations

import ast
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from raysgd.detached import cluster
from raysgd.detached.call_log import journal_path
from raysgd.torch.checkpoints import checkpoint_file
from tests.detached.programs import OPERATOR, Program
from tests.helpers.processes import is_alive, wait_until

ALL_ONCE = dict.fromkeys(range(40), 1)


def samples(log: Path, kind: str) -> dict[int, int]:
    """How often each sample was in a batch of this kind, in a group of two: a new worker warms up alone."""
    lines = [line.split(" ", 4) for line in log.read_text().splitlines()] if log.exists() else []
    batches = [ast.literal_eval(line[4]) for line in lines if line[0] == kind and line[3] == "2"]
    return Counter(sample for batch in batches for sample in batch)


def await_samples(log: Path, kind: str, count: int) -> None:
    wait_until(lambda: sum(samples(log, kind).values()) >= count)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def attached(address: str, name: str = "run") -> Program:
    program = Program(address)
    program.run(f"import os, raysgd; trainer = raysgd.attach({name!r})")
    return program


@pytest.mark.promise("A killed driver: detached trainers")
def test_calls_go_on_without_the_program_that_made_them(address: str, log: Path, tmp_path: Path) -> None:
    gate = Path(f"{log}.wait")  # no step ends while it is there
    with Program(address) as program:
        program.run(OPERATOR)
        pids = program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.05}}); pids(trainer)")
        program.begin("trainer.train()")
        await_samples(log, "train0", 8)
        gate.touch()
    with attached(address) as program:
        assert program.run("call = trainer.pending(); repr(call)") == "<train: running>"
        assert "TimeoutError" in program.fail("call.result(timeout=0.01)")["error"]
        gate.unlink()
        assert program.run("call.result()['epoch'], call.done(), call.result()['num_samples']") == [1, True, 40]
        assert program.run("trainer.pending()") is None
        program.begin("trainer.validate()")
        await_samples(log, "validate", 8)
    await_samples(log, "validate", 40)
    with attached(address) as program:
        assert program.run("trainer.pending().result()['num_samples']") == 40
        program.run(f"trainer.save({str(tmp_path / 'last.pt')!r}, blocking=False)")
        assert program.run("trainer.pending()") is None  # so that the trainer knows that the answer has arrived
    with attached(address) as program:  # it was killed between two calls
        assert program.run("trainer.pending()") is None
        assert program.run("trainer.train()['epoch']") == 2
        assert program.run("sorted(trainer.apply_all_workers(os.getpid))") == pids
        program.run("trainer.shutdown()")
        assert program.run("raysgd.detached_trainers()") == []
    assert [samples(log, kind) for kind in ("train0", "validate", "train1")] == [ALL_ONCE] * 3
    assert checkpoint_file.read(tmp_path / "last.pt")["epoch"] == 1


def test_a_trainer_that_no_one_needs_is_saved_and_ends(address: str, log: Path, tmp_path: Path) -> None:
    with Program(address) as program:
        program.run(OPERATOR)
        place = f"raysgd.Detached('forgotten', keep_alive_s=1, folder={str(tmp_path / 'new')!r})"
        pids = program.run(f"trainer = make({str(log)!r}, {place}); trainer.train(); pids(trainer)")
        host_pid = program.run("import ray; ray.get(trainer._actor.describe.remote())['pid']")
        time.sleep(2)
        assert program.run("len(raysgd.detached_trainers())") == 1  # an attached program needs it, also between calls
    wait_until(lambda: not any(map(is_alive, [*pids, host_pid])))
    assert checkpoint_file.read(tmp_path / "new" / "forgotten.pt")["epoch"] == 1
    with Program(address) as program:  # the next one of this name goes on from there
        program.run(OPERATOR)
        program.run(f"trainer = make({str(log)!r}, {place})")
        rows = program.run("history = trainer.fit(2, resume_from='auto'); [row['epoch'] for row in history]")
        assert rows == [1, 2]
        program.run("trainer.shutdown()")
    assert samples(log, "train1") == ALL_ONCE


def host_pid(program: Program) -> int:
    return int(program.run("import ray; ray.get(trainer._actor.describe.remote())['pid']"))


def pid_of_run() -> int:
    """The process of the trainer `run`, or of what took its place."""
    import ray

    return int(ray.get(cluster.find("run").describe.remote())["pid"])


KILLS_BEFORE_IT_CONFIRMS = """
import raysgd.detached.handle, ray, signal
read = raysgd.detached.handle.unpacked_answer
def killing(packed):
    if b"num_samples" in packed and b"epoch" in packed:
        raysgd.detached.handle.unpacked_answer = read
        os.kill(ray.get(trainer._actor.describe.remote())["pid"], signal.SIGKILL)
    return read(packed)
raysgd.detached.handle.unpacked_answer = killing
"""


@pytest.mark.promise("The killed process of a detached trainer")
def test_the_process_of_a_detached_trainer_may_die_in_a_call_and_between_calls(address: str, log: Path) -> None:
    import ray

    with Program(address) as program, Program(address) as other:
        program.run(OPERATOR)
        pids = program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.05}}); trainer.train(); pids(trainer)")
        other.run("import os, raysgd; trainer = raysgd.attach('run')")
        os.kill(pid_of_run(), signal.SIGKILL)
        known = ray.get(cluster.find("run").describe.remote())
        assert (len(known["programs"]), known["ends_in_s"]) == (2, None)  # without a call of theirs
        assert program.run("len(trainer.history), trainer.config['num_samples']") == [1, 40]
        program.run("call = trainer.train(blocking=False)")
        await_samples(log, "train1", 8)
        os.kill(pid_of_run(), signal.SIGKILL)
        assert other.run("trainer.pending()") is None  # its program lives, though it does not wait for the answer
        assert program.run("call.result()['epoch']") == 2
        assert program.run("[row['epoch'] for row in trainer.history]") == [1, 2]
        assert program.run("trainer.update_config(num_samples=40, step_s=0.0); trainer.config['step_s']") == 0.0
        program.run(KILLS_BEFORE_IT_CONFIRMS)
        assert program.run("trainer.config['step_s'], trainer.train()['epoch']") == [0.0, 3]
        assert other.run("trainer.pending()") is None
        assert program.run("pids(trainer)") == pids
        os.kill(pids[0], signal.SIGKILL)  # the other one has the only copy of the state
        os.kill(pid_of_run(), signal.SIGKILL)
        left = program.run("trainer.apply_all_workers(os.getpid)")
        assert (len(left), pids[1] in left, pids[0] in left) == (2, True, False)
        journal = journal_path("run", program.run("trainer._actor._actor_id.hex()"))
        assert journal.exists()
        program.run("slow = trainer.apply_all_operators(pace(0.5))")
        program.begin("trainer.train()")
        await_samples(log, "train3", 8)
        gate = Path(f"{log}.wait")  # no step ends while it is there: the call outlives the start of a new process
        gate.touch()
        os.kill(pid_of_run(), signal.SIGKILL)
        pid_of_run()
        program.interrupt()
        gate.unlink()
        found = program.found()
        assert found["error"][0] == "KeyboardInterrupt", found["text"]
        assert program.run("trainer.train()['epoch']") == 4
        program.run("trainer.shutdown()")
    assert [samples(log, f"train{epoch}") for epoch in range(3)] == [ALL_ONCE] * 3
    assert not journal.exists()


RAISES_ONCE = """
def raising(operator):
    train_batch = operator.train_batch
    def once(batch, batch_info):
        operator.train_batch = train_batch
        raise ValueError('a bad sample')
    if operator.world_rank:
        operator.train_batch = once
"""


def test_a_state_that_only_workers_have_outlives_what_ends_them(address: str, log: Path) -> None:
    with Program(address) as program:
        program.run(OPERATOR)
        pids = program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.3}}); pids(trainer)")
        program.begin("trainer.train()")
        await_samples(log, "train0", 8)
        gate = Path(f"{log}.wait")  # no step ends while it is there
        gate.touch()
        os.kill(pid_of_run(), signal.SIGKILL)
        pid_of_run()
        program.interrupt()  # of workers that another process has started
        gate.unlink()
        found = program.found()
        assert (found["error"] or ["none"])[0] == "KeyboardInterrupt", found["text"]
        result = program.run("result = trainer.train(); result['epoch'], result['num_samples'] < 40")
        assert result == [1, True], "the rest of the pass"
        assert not set(program.run("pids(trainer)")) & set(pids)
        assert set(samples(log, "train0")) == set(range(40))
        program.run(RAISES_ONCE)
        program.run("fast = trainer.apply_all_operators(pace(0.0))")
        os.kill(pid_of_run(), signal.SIGKILL)
        program.run("armed = trainer.apply_all_operators(raising)")
        assert "a bad sample" in program.fail("trainer.train()")["text"]
        assert program.run("trainer.train()['epoch']") == 2
        program.run(
            "own = DataLoader([(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(40)], batch_size=2)"
        )
        assert program.run("trainer.train(dataset=own, num_steps=3)['num_samples']") == 12
        os.kill(pid_of_run(), signal.SIGKILL)
        assert program.run("trainer.train(dataset=own)['num_samples']") == 40 - 12, "the place in the data is kept, too"
        program.run("trainer.shutdown()")


def test_fit_goes_on_when_the_process_of_its_trainer_dies_together_with_a_worker(
    address: str, log: Path, tmp_path: Path
) -> None:
    with Program(address) as program, Program(address) as other:
        program.run(OPERATOR)
        program.run(
            "class Told(raysgd.callbacks.Callback):\n"
            "    epochs = ()\n"
            "    def on_result(self, run, result):\n"
            "        self.epochs += (run.epoch,)\n"
            "        print('told of epochs', *self.epochs)\n"
            "    def state_dict(self):\n"
            "        return {'epochs': self.epochs}\n"
            "    def load_state_dict(self, state):\n"
            "        self.epochs = tuple(state['epochs'])\n"
        )
        pids = program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.05}}); pids(trainer)")
        other.run("import os, raysgd; trainer = raysgd.attach('run')")
        fit = "history = trainer.fit(3, callbacks=[Told(), raysgd.callbacks.GoodputMonitor()])"
        program.begin(f"{fit}; [row['epoch'] for row in history]")
        await_samples(log, "train1", 8)
        pid = host_pid(other)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        found = program.found()
        assert found["value"] == [1, 2, 3], found["text"]
        assert "told of epochs 1 2 3" in found["printed"]
        # An epoch that ended before the host died counts as spent before the host that reports it.
        times = program.run("[(row.get('time_useful_s', 0.0), row['seconds']) for row in history]")
        assert all(0 <= useful_s <= seconds for useful_s, seconds in times), times
        assert all(useful_s > 0 for useful_s, _ in times[1:]), times
        assert sum(useful_s for useful_s, _ in times) <= program.run("trainer.ledger().total()['useful'] / 2 + 1e-6")
        assert pids[1] in program.run("sorted(trainer.apply_all_workers(os.getpid))")
        program.run(
            "class Fatal(raysgd.callbacks.Callback):\n    def on_result(self, *_):\n        os.kill(os.getpid(), 9)"
        )
        found = program.fail("trainer.fit(1, callbacks=[Fatal()])")
        assert "TrainerLostError" in found["error"]
        assert "has died in `fit`, 3 times at the same place" in found["text"]
        assert program.run("trainer.train()['epoch']") == 5
        path = tmp_path / "last.pt"
        program.run(f"trainer.save({str(path)!r})")
        left = program.run("pids(trainer)")
        for each in (host_pid(other), *left):
            os.kill(each, signal.SIGKILL)
        assert f"The last file is {path}" in program.fail("trainer.train()")["text"]
        program.run("trainer.shutdown()")
    assert [samples(log, f"train{epoch}") for epoch in (0, 2)] == [ALL_ONCE] * 2
    assert set(samples(log, "train1")) == set(range(40))


@pytest.mark.soak  # `fit` below loses the process of its trainer, too
def test_fit_goes_on_to_its_end(address: str, log: Path, tmp_path: Path) -> None:
    with Program(address) as program:
        program.run(OPERATOR)
        program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.05}})")
        program.run(
            "class Told(raysgd.callbacks.Callback):\n"
            "    def on_result(self, run, result):\n"
            "        print('told of epoch', run.epoch)\n"
        )
        folder = str(tmp_path / "checkpoints")
        program.begin(f"trainer.fit(3, callbacks=[Told(), raysgd.callbacks.Checkpointing({folder!r})])")
        await_samples(log, "train0", 20)
    with attached(address) as program:
        program.begin("[row['epoch'] for row in trainer.pending().result()]")
        found = program.found()
        assert found["value"] == [1, 2, 3], found["text"]
        assert "told of epoch 3" in found["printed"]
        program.run("trainer.shutdown()")
    assert [samples(log, f"train{epoch}") for epoch in range(3)] == [ALL_ONCE] * 3
    assert len(list((tmp_path / "checkpoints").glob("*"))) >= 1


@pytest.mark.parametrize("num_samples", [pytest.param(10, marks=pytest.mark.soak), 26])
def test_a_run_that_acts_inside_epochs_goes_on_when_the_process_of_its_trainer_dies(
    num_samples: int, address: str, log: Path, tmp_path: Path
) -> None:
    with Program(address) as program, Program(address) as other:
        program.run(OPERATOR)
        program.run(f"trainer = make({str(log)!r}, config={{'step_s': 0.05}})")
        other.run("import os, raysgd; trainer = raysgd.attach('run')")
        saving = f"raysgd.callbacks.Checkpointing({str(tmp_path / 'files')!r}, every_n_steps=4)"
        program.begin(
            f"history = trainer.fit(3, callbacks=[{saving}], validate_every_n_steps=3, max_steps=25)\n"
            "[(row['epoch'], row['num_samples']) for row in history]"
        )
        await_samples(log, "train1", num_samples)
        os.kill(host_pid(other), signal.SIGKILL)
        found = program.found()
        assert found["value"] == [[1, 40], [2, 40]], found["text"]
        assert program.run("[each.step for each in history.records if each.step]") == [3, 6, 9, 12, 15, 18, 21, 24]
        assert program.run("trainer.apply_all_operators(lambda operator: operator.global_step)") == [25, 25]
        program.run("trainer.shutdown()")
    assert [samples(log, f"train{epoch}") for epoch in range(2)] == [ALL_ONCE] * 2
