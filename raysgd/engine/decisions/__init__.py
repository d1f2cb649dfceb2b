"""Decisions of the engine as pure functions: how many workers, what a failure means, how long to wait."""
