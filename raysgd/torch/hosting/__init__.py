"""Runs a user's PyTorch operator in a worker: its training steps, and reading and restoring its state."""
