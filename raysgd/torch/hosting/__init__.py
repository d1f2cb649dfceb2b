"""Runs a user's `TrainingOperator` in a worker: tracks its training steps, and reads and restores its state."""
