"""The implementation of `fit()`: one run of a training function, from its start to its `Result`.

Guarantees:

* A checkpoint in the storage is always complete. Workers write their files to a staging folder, which becomes a
  checkpoint when the driver commits it. The driver itself writes checkpoints that are dicts.
* A failed run continues from its newest checkpoint with the available workers, as often as `FailureConfig` allows.
* Rank 0's reports are written as they arrive.

Other packages do the rest: the engine keeps the workers alive, `raysgd.storage` manages the files, and `raysgd.air`
defines the configs, checkpoints and results.
"""
