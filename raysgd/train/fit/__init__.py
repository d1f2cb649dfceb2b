"""The parts behind `fit()`: one run of a function, from its start to its `Result`.

What it guarantees:

* A checkpoint is whole or not there. Workers store folders themselves; the driver commits them, and writes dicts.
* A run that failed goes on from its newest checkpoint, as often as `FailureConfig` allows, with the workers there are.
* What the function of rank 0 reports is written down as it comes.

What it leaves to others: the engine keeps the workers alive, `raysgd.storage` holds the files, `raysgd.air` the values.
"""
