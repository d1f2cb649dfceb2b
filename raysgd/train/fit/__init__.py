"""The implementation of `fit()`: one run of a function, from its start to its `Result`.

Guarantees:

* A checkpoint is always complete. Workers store folders themselves; the driver commits them and writes dicts.
* A failed run continues from its newest checkpoint with the available workers, as often as `FailureConfig` allows.
* Rank 0's reports are written as they arrive.

Other packages do the rest: the engine keeps the workers alive, `raysgd.storage` manages the files, and `raysgd.air`
defines the values.
"""
