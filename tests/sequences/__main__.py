"""Runs sequences of calls and deaths, and prints those that are wrong.

python -m tests.sequences --kind collate --sequences 500 --seed 1 --processes 2
python -m tests.sequences --kind collate --only 4711
python -m tests.sequences --kind collate --only "train lose:1 validate kill:1 train" --times 5
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from tests.helpers.forked import forks, to_lend
from tests.helpers.ray_start import VARIABLES
from tests.sequences.grammar import read
from tests.sequences.kinds import KINDS, preloaded, subject_class
from tests.sequences.running import NUM_OF_ONE_TRAINER, Runner, Sums, interrupt, laboratory

SUMS = "sums: "
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",  # as Ray does in the process that starts a cluster, where this one may only connect
    "RAY_USAGE_STATS_ENABLED": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def run_here(arguments: argparse.Namespace) -> Sums:
    """Run sequences in this process."""
    sums = Sums()
    with suppress(KeyboardInterrupt), laboratory(arguments.kind) as folder:
        runner = Runner(arguments.kind, subject_class(arguments.kind), folder, sums)
        try:
            if arguments.only is None:
                for seed in range(arguments.seed, arguments.seed + arguments.sequences):
                    tell(runner.run_seed(seed))
                    print(
                        f"\r{sums.num_sequences} sequences, {len(sums.wrong)} wrong",
                        end="",
                        file=sys.stderr,
                        flush=True,
                    )
            for _ in range(arguments.times if arguments.only is not None else 0):
                is_seed = arguments.only.isdigit()
                tell(runner.run_seed(int(arguments.only)) if is_seed else runner.run(read(arguments.only)))
        finally:
            runner.close()
    return sums


def run_in_processes(arguments: argparse.Namespace) -> Sums:
    """Run sequences in several processes, each with a cluster of its own."""
    num_trainers = -(-arguments.sequences // (arguments.processes * NUM_OF_ONE_TRAINER))
    num_each, end = num_trainers * NUM_OF_ONE_TRAINER, arguments.seed + arguments.sequences
    sums = Sums()
    with forks(preloaded(arguments.kind)):
        threads = [
            threading.Thread(target=_run_another, args=(arguments.kind, first, min(num_each, end - first), sums))
            for first in range(arguments.seed, end, num_each)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                with suppress(KeyboardInterrupt):  # the others get it, too, and say what they have done
                    thread.join()
    return sums


def _run_another(kind: str, seed: int, num_sequences: int, sums: Sums) -> None:
    command = [sys.executable, "-m", "tests.sequences", "--kind", kind, "--as-json"]
    command += ["--seed", str(seed), "--sequences", str(num_sequences)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **to_lend()}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(SUMS):
                sums.add(Sums.from_json(line.removeprefix(SUMS)))
            elif line.startswith("--kind"):
                tell(line.rstrip())


def tell(line: str | None) -> None:
    """Print in one piece: Ray's own thread prints, too."""
    if line is not None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def begin_again_with_variables() -> None:
    """Let this program begin with the variables that Ray, TensorFlow and others read when they are imported."""
    variables = {**ENVIRONMENT, **VARIABLES}
    if not variables.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", "tests.sequences", *sys.argv[1:]], {**variables, **os.environ})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--sequences", type=int, default=50, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the others have the following numbers")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", help="a seed, or a sequence in words: see `tests/sequences/grammar.py`")
    parser.add_argument("--times", type=int, default=1, help="how often to run it")
    parser.add_argument("--verbose", action="store_true", help="log what happens")
    parser.add_argument("--as-json", action="store_true", help="print the sums for a program")
    arguments = parser.parse_args()
    begin_again_with_variables()
    logging.getLogger("raysgd").setLevel(logging.INFO if arguments.verbose else logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    is_alone = arguments.processes == 1 or arguments.only is not None
    sums = run_here(arguments) if is_alone else run_in_processes(arguments)
    tell(f"{SUMS}{sums.to_json() if arguments.as_json else sums}")
    return int(bool(sums.wrong))


if __name__ == "__main__":
    sys.exit(main())
