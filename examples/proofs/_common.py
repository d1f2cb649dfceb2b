"""Shared by the proofs: command-line arguments, a Ray cluster, the digits of scikit-learn, and the printed result.

A proof trains once in one process and once on workers, and shows both scores:

    args = parse_arguments(__doc__)
    with ray_running(args):
        scores = [train(options) for options in one_process_then_workers(args)]
    print_result(args, accuracy=scores[-1], accuracy_of_one_process=scores[0])
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # fewer logs in proofs that import TensorFlow later


def parse_arguments(description: str | None, *, num_workers: int = 2, **more: str) -> argparse.Namespace:
    """Parse the command-line arguments that every proof takes.

    Args:
        description: Docstring of the proof.
        num_workers: Default number of workers.
        **more: Help texts of further arguments, by name.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    workers = f"processes that train together (default: {num_workers}); 1 trains in this process, without Ray"
    parser.add_argument("--num-workers", type=int, default=num_workers, help=workers)
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="train only briefly, to see that it runs")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    parser.add_argument("--json", action="store_true", help="print the result as a line of JSON, for programs")
    for name, text in more.items():
        parser.add_argument(f"--{name}", help=text)
    args = parser.parse_args()
    args.began = time.monotonic()
    return args


@contextmanager
def ray_running(args: argparse.Namespace, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to a running cluster, or start a cluster on this machine, for the block.

    Does nothing for a single worker, which does not need Ray, unless `num_cpus` is given.

    Args:
        args: Arguments from `parse_arguments`.
        num_cpus: Number of CPUs that the proof needs. Default: one for each worker.
    """
    if args.num_workers == 1 and num_cpus is None:
        yield
        return
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other machines of a cluster do not have this file
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if args.address is None:
        num_cpus = max(num_cpus or args.num_workers, os.cpu_count() or 1)
        options.update(address="local", num_cpus=num_cpus, include_dashboard=False)
    else:
        options.update(address=args.address)
    with redirect_stdout(_WithoutRaylet(sys.stdout)):
        ray.init(**options)
        try:
            yield
        finally:
            ray.shutdown()


class _WithoutRaylet:
    """Redirect standard output, without the lines of Ray's own processes, which print many lines for each dead node.

    Args:
        output: Stream for all other output.
    """

    def __init__(self, output: Any) -> None:
        self._output, self._ends_dropped = output, False

    def write(self, text: str) -> int:
        is_end, self._ends_dropped = text == "\n" and self._ends_dropped, "(raylet)" in text
        return len(text) if is_end or self._ends_dropped else self._output.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def one_process_then_workers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the arguments of two trainers: the first trains in this process, the second on workers."""
    print("training in one process", flush=True)
    yield {"num_workers": 1, "use_local": True, "use_gpu": args.use_gpu}
    if args.num_workers > 1:
        print(f"training on {args.num_workers} workers", flush=True)
        yield {"num_workers": args.num_workers, "use_gpu": args.use_gpu}


def load_digits() -> tuple[Arrays, Arrays, Arrays]:
    """Return the 1,797 real digits of scikit-learn as train, validation and test data: `(images, labels)` each.

    Images have the shape (8, 8) and values from 0 to 1. The parts are 64 %, 16 % and 20 %, and always the same.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype("float32").reshape(-1, 8, 8)
    rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, validation = train_test_split(rest, test_size=0.2, stratify=labels[rest], random_state=0)
    train, validation, test = [(images[part], labels[part]) for part in (train, validation, test)]
    return train, validation, test


def print_result(args: argparse.Namespace, verdict: str = "", **results: Any) -> None:
    """Print the results as text, or as one line of JSON with `--json`.

    Args:
        args: Arguments from `parse_arguments`.
        verdict: Sentence that says what the results mean.
        **results: The results. A result whose name ends in `_of_one_process` is shown next to the result of the
            workers.
    """
    seconds = round(time.monotonic() - args.began, 1)
    if args.json:
        print(json.dumps({**results, "num_workers": args.num_workers, "seconds": seconds}), flush=True)
        return
    compared = {name: results[f"{name}_of_one_process"] for name in results if f"{name}_of_one_process" in results}
    print(f"\n{args.num_workers} worker(s), {seconds:.0f} s")
    for name, value in results.items():
        if not name.endswith("_of_one_process"):
            alone = f" (in one process: {_shown(compared[name])})" if name in compared else ""
            print(f"  {name.replace('_', ' ')}: {_shown(value)}{alone}")
    if verdict:
        print(verdict, flush=True)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
