"""Keys of an operator's config that raysgd itself reads."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""The batch size of all workers together. The asterisk keeps it apart from keys of users."""
PLAIN_BATCH_SIZE = "batch_size"
"""The batch size of one worker, an alternative to `BATCH_SIZE`."""
