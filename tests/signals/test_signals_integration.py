"""Programs that signals end, and that are started again until they are done. `python -m tests.signals` makes many."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.forked import Forks, NoForks, to_lend
from tests.helpers.ray_start import UNDER_TIMEOUT
from tests.signals import __main__ as signals
from tests.signals.__main__ import (
    ROOT,
    Program,
    Sums,
    difference,
    difference_after,
    disturbed,
    in_peace,
    result_in,
    workers_among,
)

ARGUMENTS = ["--epochs", "4", "--workers", "2"]


@pytest.fixture(autouse=True)
def lends_forks(worker_forks: Forks | NoForks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs fork their workers, too."""
    for name, value in to_lend().items():
        monkeypatch.setenv(name, value)


def await_step(program: Program, step: int) -> None:
    """Wait until a program has told of a step."""
    while max(program.told("step"), default=0) < step:
        assert program.process.poll() is None, (program.folder / "log").read_text()[-2000:]
        time.sleep(0.002)


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.timeout(600)  # on a slow machine each start takes half a minute
@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs the program `timeout`")
def test_a_program_under_timeout_is_done_some_day_and_is_the_one_that_ran_in_peace(tmp_path: Path) -> None:
    """`timeout` sends the signal to all processes of the program, Ray's own included."""
    for name in ("whole", "left"):
        (tmp_path / name).mkdir()
    wanted = in_peace(tmp_path / "whole", ARGUMENTS)
    seconds = 6.0  # less than 80 steps of 0.1 s take, so the first program is ended on any machine
    program = [sys.executable, "-m", "tests.signals.program", str(tmp_path / "left"), *ARGUMENTS, "--step-s", "0.1"]
    statuses = []
    while not (tmp_path / "left" / "done.pt").exists() and len(statuses) < 8:
        command = ["timeout", "-s", "TERM", str(seconds), *program]
        statuses.append(subprocess.call(command, cwd=ROOT, env={**os.environ, **UNDER_TIMEOUT}))
        seconds *= 2  # on a busy machine the start alone may take as long
    assert 124 in statuses, "it was ended at least once"
    assert difference(result_in(tmp_path / "left"), wanted, 0.0) is None


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.parametrize(
    ("is_frozen", "gone_s", "more"),
    [
        (True, 0.0, []),
        pytest.param(True, 4.0, [], marks=pytest.mark.soak),  # each of the two is in another case
        (False, 4.0, []),
        (False, 4.0, ["--use-local"]),
    ],
    ids=["at once", "frozen before", "gone before", "gone before, with a worker in the driver"],
)
def test_what_the_driver_holds_is_saved_where_ray_is_gone(
    is_frozen: bool, gone_s: float, more: list[str], worker_forks: Forks | NoForks, tmp_path: Path
) -> None:
    """Ray itself would kill the program after a minute without its head node, or in any call that asks that node."""
    arguments = ["--epochs", "20", "--step-s", "0.1", "--snapshot-every-n-steps", "4", *more]
    program = Program(tmp_path, arguments)
    family: list[psutil.Process] = []
    try:
        assert program.await_begin()
        await_step(program, 12)
        family, workers = psutil.Process(program.process.pid).children(recursive=True), []
        forked = psutil.Process(worker_forks.server.pid).children() if isinstance(worker_forks, Forks) else []
        while is_frozen and len(workers) < 2:
            workers = workers_among([*family, *forked])
        for each in workers:
            each.suspend()
        for each in family:
            if each.name() in ("gcs_server", "raylet"):
                each.kill()
        time.sleep(gone_s)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(150.0) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()[-2000:]
    finally:
        program.close(family)
    assert program.told("end") == ["Preempted"]
    assert max(program.told("saved")) >= 4


@pytest.mark.integration
@pytest.mark.program
def test_a_run_that_has_just_been_resumed_is_saved_where_the_signal_stops_ray_at_once(tmp_path: Path) -> None:
    """SIGUSR1 ends Ray's own processes without delay, and the state that was loaded lies in the store of Ray."""
    for first, to_group in ((signal.SIGTERM, False), (signal.SIGUSR1, True)):
        program = Program(tmp_path, ["--epochs", "2", "--step-s", "0.1"])
        family: list[psutil.Process] = []
        try:
            assert program.await_begin()
            begin = max(program.told("begin"))
            await_step(program, begin + 2)
            family = psutil.Process(program.process.pid).children(recursive=True)
            program.process.send_signal(first)
            if to_group:
                os.killpg(program.process.pid, first)
            assert program.process.wait(150.0) == 128 + first, (tmp_path / "log").read_text()[-2000:]
        finally:
            program.close(family)
        assert program.told("end") == ["Preempted"]
        assert program.told("saved") >= [begin + 1]


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.parametrize("step", [20, 33])
def test_a_large_state_that_is_on_its_way_when_the_signal_stops_ray_costs_no_more_than_its_steps(
    step: int, tmp_path: Path
) -> None:
    """A state of 20 MB comes through Ray's store; who reads from it when it is gone is ended by Ray, without a word."""
    program = Program(tmp_path, ["--kind", "large", "--epochs", "20", "--step-s", "0.02"])
    family: list[psutil.Process] = []
    try:
        assert program.await_begin()
        await_step(program, step)
        family = psutil.Process(program.process.pid).children(recursive=True)
        os.killpg(program.process.pid, signal.SIGUSR1)
        assert program.process.wait(150.0) == 128 + signal.SIGUSR1, (tmp_path / "log").read_text()[-2000:]
    finally:
        program.close(family)
    assert program.told("end") == ["Preempted"]
    saved = max(program.told("saved"))
    assert saved >= step // 20 * 20
    epochs = saved // 20 + 1  # on a busy machine, the test hears of a step when the program is already far beyond
    program = Program(tmp_path, ["--kind", "large", "--epochs", str(epochs), "--step-s", "0"])
    assert program.process.wait(150.0) == 0, (tmp_path / "log").read_text()[-2000:]
    program.close()
    assert program.told("begin") == [saved]


@pytest.mark.integration
@pytest.mark.program
@pytest.mark.timeout(600)
def test_a_signal_at_the_end_of_a_run_ends_the_program(tmp_path: Path) -> None:
    """In `on_run_end`, and in the body of a loop that the program leaves; the next program is the one that is done."""
    sums, arguments = Sums(), ["--epochs", "3", "--use-local", "--workers", "1"]
    for kind in ("TERM in on_run_end", "TERM in the body"):
        folder = tmp_path / kind
        folder.mkdir()
        found = disturbed(folder, arguments, [1], random.Random(3), sums, [kind], 1, step_s=0.0)
        assert not sums.faults, str(sums)
        assert found is not None
    assert sums.ends.total() == 2


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "workers", "is_deterministic"),
    [
        ("plain", [2], True),
        ("stream", [2], True),
        ("gan", [2], False),
        ("accumulate", [2], False),
        ("plain", [3, 2, 4], False),
        ("stream", [3, 2, 4], False),
        ("gan", [3, 2, 4], False),
        ("accumulate", [3, 2, 4], False),
    ],
    ids=str,
)
def test_no_step_is_lost_whatever_ends_the_program(
    kind: str, workers: list[int], is_deterministic: bool, tmp_path: Path
) -> None:
    arguments, sums, rng = ["--kind", kind, "--epochs", "20"], Sums(), random.Random(7)
    arguments += ["--deterministic"] if is_deterministic else []
    for name in ("whole", "left"):
        (tmp_path / name).mkdir()
    wanted = in_peace(tmp_path / "whole", [*arguments, "--workers", str(workers[0])])
    found = disturbed(tmp_path / "left", arguments, workers, rng, sums, signals.KINDS, 40)
    assert not sums.faults, str(sums)
    assert found is not None
    assert difference_after(sums.ends, found, wanted, kind, workers, is_deterministic) is None
