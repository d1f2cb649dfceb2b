"""Runs programs with the library and in one process without it, and prints those that are wrong or refused.

python -m tests.programs --kind counts --programs 30 --seed 1 --processes 1
python -m tests.programs --kind counts --only 4711 --smallest
python -m tests.programs --kind counts --only "workers=2 collate=drop batch=9" --times 5
python -m tests.programs --kind counts --programs 12 --record before.txt
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

from tests.helpers.forked import FOR_TORCH, forks, to_lend
from tests.helpers.ray_start import VARIABLES
from tests.programs.kinds import KINDS
from tests.programs.running import EQUAL, Runner, Sums, laboratory
from tests.sequences.__main__ import ENVIRONMENT, tell
from tests.sequences.running import interrupt

SUMS = "sums: "


def run_here(arguments: argparse.Namespace) -> Sums:
    """Run programs in this process."""
    with laboratory():
        runner = Runner(arguments.kind)
        if arguments.only is None:
            programs: list[int | str] = list(range(arguments.seed, arguments.seed + arguments.programs))
        else:
            programs = [int(each) if each.isdigit() else each for each in arguments.only] * arguments.times
        for number, program in enumerate(programs, 1):
            verdict = runner.run(program)
            print(f"\r{number} programs, {len(runner.sums.wrong)} wrong", end="", file=sys.stderr, flush=True)
            if verdict.word != EQUAL or arguments.only is not None:
                tell(str(verdict))
            if arguments.record is not None:
                with arguments.record.open("a", encoding="utf-8") as file:
                    file.write(f"{verdict} | {verdict.exact}\n".replace(os.getcwd(), "."))
            if arguments.smallest and verdict.word != EQUAL:
                tell(f"    the smallest is {runner.smallest(program)}")
    return runner.sums


def run_in_processes(arguments: argparse.Namespace) -> Sums:
    """Run programs in several processes, each with a cluster of its own."""
    num_each, end = -(-arguments.programs // arguments.processes), arguments.seed + arguments.programs
    sums = Sums()
    with forks(FOR_TORCH):
        threads = [
            threading.Thread(target=_run_another, args=(arguments, first, min(num_each, end - first), sums))
            for first in range(arguments.seed, end, num_each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sums


def _run_another(arguments: argparse.Namespace, seed: int, num_programs: int, sums: Sums) -> None:
    command = [sys.executable, "-m", "tests.programs", "--kind", arguments.kind, "--as-json"]
    command += ["--seed", str(seed), "--programs", str(num_programs), *["--smallest"] * arguments.smallest]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **to_lend()}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(SUMS):
                sums.add(Sums.from_json(line.removeprefix(SUMS)))
            else:
                tell(line.rstrip())


def begin_again_with_variables() -> None:
    """Let this program begin with the variables that Ray and others read when they are imported."""
    variables = {**ENVIRONMENT, **VARIABLES}
    if not variables.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "tests.programs", *sys.argv[1:]], {**variables, **os.environ})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--programs", type=int, default=30, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the others have the following numbers")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="seeds, or programs in words: see `tests/programs/grammar.py`")
    parser.add_argument("--times", type=int, default=1, help="how often to run them")
    parser.add_argument("--smallest", action="store_true", help="leave out words of a wrong one as long as it is wrong")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    parser.add_argument(
        "--record", type=Path, help="where to add what came of each, to the last bit: two versions can be compared"
    )
    parser.add_argument("--as-json", action="store_true", help="print the sums for a program")
    arguments = parser.parse_args()
    begin_again_with_variables()
    warnings.simplefilter("ignore")
    logging.getLogger("raysgd").setLevel(logging.INFO if arguments.verbose else logging.CRITICAL)
    signal.signal(signal.SIGTERM, interrupt)
    is_alone = arguments.processes == 1 or arguments.only is not None or arguments.record is not None
    sums = run_here(arguments) if is_alone else run_in_processes(arguments)
    tell(f"{SUMS}{sums.to_json() if arguments.as_json else sums}")
    return int(bool(sums.wrong) or sums.are_too_many_refused)


if __name__ == "__main__":
    sys.exit(main())
