"""The parts behind `fit()`: one run of a function, from its start to its `Result`.

What it guarantees:

* A checkpoint is always complete. Workers store folders themselves; the driver commits them, and writes dicts.
* A run that failed continues from its newest checkpoint with the available workers, as often as `FailureConfig` allows.
* Reports of rank 0 are written down as they arrive.

What it leaves to others: the engine keeps the workers alive, `raysgd.storage` holds the files, `raysgd.air` the values.
"""
