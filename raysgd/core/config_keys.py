"""The keys of an operator's config that raysgd reads."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""Key of the global batch size, of all workers together. The asterisk distinguishes it from keys of the user."""
PLAIN_BATCH_SIZE = "batch_size"
"""Key of the batch size of one worker, an alternative to `BATCH_SIZE`."""
