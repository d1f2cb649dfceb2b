"""The keys that raysgd reads in an operator's config, such as the key for the batch size."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""Key of the batch size. The asterisk distinguishes it from keys of the user.

In the trainer's config, the value is the global batch size: the number of samples that all workers together process in
a step. In the config that a worker's operator gets, the value is the batch size of that worker or, with
`split_batches=True`, still the global batch size.
"""
PLAIN_BATCH_SIZE = "batch_size"
"""Another key for the batch size of one worker or, with `split_batches=True`, for the global batch size."""
