"""How many random edits of the engine are found: by the simulator with random seeds alone, or else by unit tests.

python -m tests.simulator.surviving --edits 200 --schedules 2000

Each edit has a process of its own, which imports the engine with it. It is found if a schedule breaks an invariant,
raises, or does not end. The first few hundred schedules come first, then the unit tests, then all other schedules.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

from tests.simulator.edits import FOLDER, KINDS, PACKAGE, Edit, drawn, put_in
from tests.simulator.explained import EXPLAINED

SEED = 35
NUM_EDITS = 200
NUM_FIRST = 300
NUM_SCHEDULES = 2000
"""For those that neither the first schedules nor the unit tests find."""

NUM_TRACED = 500
"""Schedules by which is seen which lines the simulator reaches."""

LONGEST_S = 15.0
"""Processor time of one schedule, some thousand times what one takes."""

STILL_S = 30.0
"""Real time between two looks. Where a process has done next to nothing meanwhile, its threads wait for each other."""

NEXT_TO_NOTHING_S = 0.02

TESTS_S = 120
"""Processor time of the unit tests, some ten times what they take."""

MOST_BYTES = 3 * 2**30
FOREIGN = ("numpy", "ray", "torch", "pytest")
"""What is imported once and for all: it knows nothing of the engine."""

UNIT_TESTS = FOLDER.parents[2] / "tests" / "core" / "engine"
OPTIONS = ("-m", "not integration and not soak and not gpu and not program", "-x", "-q", "-n", "0")
QUIETLY = ("-p", "no:cacheprovider", "-W", "ignore")

By = Literal["simulator", "unit tests", "survives"]


@dataclass(frozen=True)
class Result:
    """What became of an edit.

    Attributes:
        edit: The edit, as text.
        kind: Of which kind it is.
        by: What found it.
        num_schedules: How many schedules that took; 0 where the engine could not even be imported.
        why: What the simulator saw.
        is_reached: Whether the simulator runs what was edited at all.
    """

    edit: str
    kind: str
    by: By
    num_schedules: int | None
    why: str
    is_reached: bool


# ------------------------------------------------------------------------------------ in a process of its own


def in_process(work: Callable[..., None], *args: Any) -> Any:
    """What `work` sends from a process of its own; None where that ended without a word."""
    context = multiprocessing.get_context("fork")  # what is foreign is imported already
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, *args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


class _Search:
    """What the process of an edit says, and when: at the end of its search, or of a schedule that does not end."""

    def __init__(self, answer: Connection) -> None:
        self._answer = answer
        self._num_begun, self._busy_s = 0, 0.0
        signal.signal(signal.SIGPROF, lambda *_: self.find("a schedule takes time without an end"))
        signal.signal(signal.SIGALRM, lambda *_: self._look())
        signal.setitimer(signal.ITIMER_REAL, STILL_S, STILL_S)

    def begin(self) -> None:
        """Another schedule begins."""
        self._num_begun += 1
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)

    def _look(self) -> None:
        before_s, self._busy_s = self._busy_s, time.process_time()
        if self._busy_s - before_s < NEXT_TO_NOTHING_S:
            self.find("a schedule stands still")

    def find(self, why: str) -> NoReturn:
        self.end(self._num_begun, why[:200])

    def end(self, num_schedules: int | None, why: str = "") -> NoReturn:
        self._answer.send((num_schedules, why))
        os._exit(0)


def simulate(answer: Connection, edit: Edit, num_schedules: int) -> None:
    """Sends how many schedules it took to find the edit, and what they broke; None for the number if none did."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    _be_silent()
    search = _Search(answer)
    put_in(edit)
    try:
        from tests.simulator.running import quiet, run
        from tests.simulator.schedule import drawn as schedule_of

        with quiet():
            for seed in range(num_schedules):
                search.begin()
                broken = run(schedule_of(seed)).broken
                if broken is not None:
                    search.find(broken)
    except BaseException as error:  # an assertion too: without the edit, nothing is raised here
        search.find(f"{type(error).__name__}: {error}")
    search.end(None)


def trace(answer: Connection, num_schedules: int) -> None:
    """Sends the lines of the engine that so many schedules run, by module."""
    _be_silent()
    lines: set[tuple[str, int]] = set()
    folder = str(FOLDER)

    def each_line(frame: Any, event: str, arg: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return each_line

    def each_call(frame: Any, event: str, arg: Any) -> Any:
        return each_line(frame, event, arg) if frame.f_code.co_filename.startswith(folder) else None

    threading.settrace(each_call)
    sys.settrace(each_call)
    from tests.simulator.running import quiet, run
    from tests.simulator.schedule import drawn as schedule_of

    with quiet():
        for seed in range(num_schedules):
            run(schedule_of(seed))
    sys.settrace(None)
    answer.send({(Path(file).stem, line) for file, line in lines})
    os._exit(0)


def run_unit_tests(answer: Connection, edit: Edit) -> None:
    """Sends whether they find the edit: those of its module first, which are likely to."""
    resource.setrlimit(resource.RLIMIT_CPU, (TESTS_S, TESTS_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    _be_silent()
    put_in(edit)
    own = [str(path) for path in UNIT_TESTS.rglob(f"test_{edit.module}.py")]
    answer.send(any(not _do_pass(paths) for paths in (own, [str(UNIT_TESTS)]) if paths))
    os._exit(0)


def _do_pass(paths: Sequence[str]) -> bool:
    import pytest

    try:
        return pytest.main([*paths, *OPTIONS, *QUIETLY]) == 0
    except BaseException:
        return False


def _be_silent() -> None:
    """Whatever it prints, and whatever its threads raise."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nowhere, each)
    threading.excepthook = lambda args: None


# ------------------------------------------------------------------------------------ all of them


def results_of(edits: Iterable[Edit], num_schedules: int, num_traced: int = NUM_TRACED) -> Iterator[Result]:
    """What becomes of each edit, one after the other."""
    for name in FOREIGN:
        importlib.import_module(name)
    assert PACKAGE not in sys.modules, "the engine is imported once for each edit"
    reached = in_process(trace, num_traced)
    for edit in edits:
        first, last = edit.lines
        is_reached = any((edit.module, line) in reached for line in range(first, last + 1))
        yield _result_of(edit, num_schedules if is_reached else 0, is_reached)


def _result_of(edit: Edit, num_schedules: int, is_reached: bool) -> Result:
    """Most that the simulator finds it finds soon, and unit tests cost less than many schedules."""
    for most in sorted({min(NUM_FIRST, num_schedules), num_schedules} - {0}):
        found = in_process(simulate, edit, most)
        count, why = (1, "its process ended") if found is None else found
        if count is not None:
            return Result(str(edit), edit.kind, "simulator", count, why, is_reached)
        if most <= NUM_FIRST and _do_tests_find(edit):
            return Result(str(edit), edit.kind, "unit tests", None, "", is_reached)
    is_found = not num_schedules and _do_tests_find(edit)
    return Result(str(edit), edit.kind, "unit tests" if is_found else "survives", None, "", is_reached)


def _do_tests_find(edit: Edit) -> bool:
    return in_process(run_unit_tests, edit) is not False


# ------------------------------------------------------------------------------------ the table


def as_table(results: Sequence[Result]) -> str:
    """How many edits of each kind were found by what, and all together; then those of what the simulator runs."""
    head = "| edit | drawn | found by the simulator | only by unit tests | survive |", "|---|---|---|---|---|"
    rows = [_row(kind, [each for each in results if each.kind == kind]) for kind in KINDS]
    reached = [each for each in results if each.is_reached]
    return "\n".join([*head, *rows, _row("all", results), _row("all that the simulator runs", reached)])


def _row(words: str, results: Sequence[Result]) -> str:
    counts = Counter(each.by for each in results)
    return f"| {words} | {len(results)} | {counts['simulator']} | {counts['unit tests']} | {counts['survives']} |"


def survivors(results: Iterable[Result]) -> str:
    """Those that survive, with why that is right: see `explained`."""
    lines = (
        f"{each.edit}\n    {'' if each.is_reached else '(not run by the simulator) '}{EXPLAINED.get(each.edit, '?')}"
        for each in results
        if each.by == "survives"
    )
    return "\n".join(lines)


def unexplained(results: Iterable[Result]) -> list[str]:
    return [each.edit for each in results if each.by == "survives" and each.edit not in EXPLAINED]


def main() -> None:
    """Prints the table, and what survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--edits", type=int, default=NUM_EDITS)
    parser.add_argument("--schedules", type=int, default=NUM_SCHEDULES, help="that a survivor has to survive")
    parser.add_argument("--seed", type=int, default=SEED, help="draws the edits")
    parser.add_argument("--results", type=Path, help="a file of lines, which is continued where it ends")
    arguments = parser.parse_args()
    results = read(arguments.results)
    known = {each.edit for each in results}
    edits = [edit for edit in drawn(arguments.edits, arguments.seed) if str(edit) not in known]
    for result in results_of(edits, arguments.schedules) if edits else ():
        results.append(result)
        print(f"{len(results)} {result.by} {result.num_schedules} {result.edit}", file=sys.stderr, flush=True)
        if arguments.results is not None:
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print(as_table(results), survivors(results), sep="\n\n")


def read(path: Path | None) -> list[Result]:
    """The results in a file, as `--results` writes them."""
    if path is None or not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
