"""The keys that raysgd reads in an operator's config, such as the key for the batch size."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""Key of the global batch size, of all workers together. The asterisk distinguishes it from keys of the user."""
PLAIN_BATCH_SIZE = "batch_size"
"""Key of the batch size of one worker, an alternative to `BATCH_SIZE`."""
