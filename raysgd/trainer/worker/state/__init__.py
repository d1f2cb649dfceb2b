"""The state of one worker: reading, checking, copying and restoring it."""
