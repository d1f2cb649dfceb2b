"""Runs a user's operator inside a worker: its data, its training loop, and its state between calls."""
