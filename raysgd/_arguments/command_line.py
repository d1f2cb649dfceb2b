"""Arguments of the example modules that are run with `python -m`, and their connection to Ray."""

from __future__ import annotations

import argparse


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The arguments `num_workers`, `use_gpu` and `smoke_test`; connects to Ray if there is an `--address`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--num-workers", type=int, default=1, help="processes that train together (default: 1)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="train briefly on made-up data")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    if args.address is not None:
        import ray

        ray.init(address=args.address)
    return args
