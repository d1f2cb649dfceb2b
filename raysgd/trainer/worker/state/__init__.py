"""One worker's state: reading, checking, copying and restoring it."""
