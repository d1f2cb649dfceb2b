"""The keys that raysgd reads in an operator's config, such as the key for the batch size."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""Key of the batch size. The asterisk distinguishes it from keys of the user.

In the trainer's config, it is the global batch size, of all workers together. In the config that the operator of a
worker gets, it is the batch size of that worker, or with `split_batches=True` still the global one.
"""
PLAIN_BATCH_SIZE = "batch_size"
"""Key of the batch size of one worker, an alternative to `BATCH_SIZE`. With `split_batches=True`, the global one."""
